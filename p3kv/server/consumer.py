"""The paper's second queue: received slices wait by urgency, and the consumer handles them.

The consumer takes the most urgent slice from the queue and adds it to its round's sum. When the
round is complete, it updates the slice and queues the value to every worker that wants it (P3
section 4.2).
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from p3kv.config import Launch
from p3kv.consistency import BulkSynchronous, consistency_of_key
from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.server.aggregation import Aggregator
from p3kv.server.buffers import Buffer, BufferPool
from p3kv.server.checkpoints import Checkpoints
from p3kv.server.clipping import Clipping
from p3kv.server.finite import NotFinite
from p3kv.server.keys import ServerKey
from p3kv.server.lateness import Lateness, Readiness
from p3kv.server.rows import RowsKey
from p3kv.server.rows_traffic import RowsTraffic
from p3kv.server.slice_states import SliceState
from p3kv.server.spans import trace_sum, trace_update
from p3kv.server.states import States
from p3kv.server.values import Values
from p3kv.server.waiting import Pull, Waiting
from p3kv.server.workers import Workers
from p3kv.slicing import LAYOUTS
from p3kv.trace import Tracer, now_ns
from p3kv.wire.connection import Connection
from p3kv.wire.framing import Landing
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    HEADER_BYTES,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    WANTS_RESULT,
    Header,
    Kind,
    pack_header,
)
from p3kv.wire.messages import UNKNOWN, DeclaredKey, Squares, Terms, encode
from p3kv.wire.queue import PriorityQueue, urgency
from p3kv.wire.spans import traced_arrival
from p3kv.wire.terms import TermsByRound

_log = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 48 << 20
"""Received pushes that may wait: enough to choose from, few compared with the weights."""
_BATCH_BYTES = 16 * 1024
"""Bytes of frames handled before the loop looks at sockets again: one slice, or many tiny tensors
that arrived together, whose values leave together."""
_NOT_FINITE = (
    "Look at this worker's batch, its loss and the learning rate; with P3KV_CHECK_FINITE=0 the job "
    "goes on."
)


class _Push(NamedTuple):
    """A worker's slice that waits in the queue."""

    key: ServerKey
    state: SliceState
    gradient: Optional[Buffer]
    """None: nothing is to be added to the sum, but the slice's rounds may end."""
    ready_s: float = 0.0
    """When the gradient was ready, on this process's clock."""
    counts: bool = True
    """Whether a worker is counted, or its host's sum."""


_Act = Callable[[], bool]
"""What to do with a frame of a key of rows; returns whether a round has ended."""


class Consumer:
    """Sums, updates and sends back, slice by slice, the most urgent first.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        launch: Launch,
        workers: Workers,
        on_lost: Callable[[Connection, str], None],
        fail: Callable[..., None],
        call_soon: Callable[..., None],
        worked_s: Callable[[], float],
    ) -> None:
        """`on_lost(connection, reason)` ends a connection that broke the protocol;
        `fail(reason, round, error)` ends the job; `error` names a class in p3kv.errors. `call_soon`
        has the server's thread call something; `worked_s()` says for how long it has worked."""
        self.rank = UNKNOWN
        self.tracer = Tracer(None, "server")
        self._pool = BufferPool()
        self.clipping: Clipping[SliceState] = Clipping(self._send_squares)
        self.aggregator = Aggregator(
            BulkSynchronous(launch.num_workers), self._pool, clipping=self.clipping
        )
        self.lateness = Lateness(launch.num_workers)
        self._readiness = Readiness(launch.num_workers)
        self._workers = workers
        self._on_lost = on_lost
        self._fail = fail
        self._queue: PriorityQueue[Tuple[Connection, Header, Union[_Push, _Act, None]]]
        self._queue = PriorityQueue()
        self._waiting_bytes = 0
        self._waiting_frames = [0] * launch.num_workers
        """By rank, how many of the worker's frames are in the queue."""
        self._terms = TermsByRound()
        self._keys: Dict[int, ServerKey] = {}
        self.values = Values(
            lambda: self.rank, workers, self.aggregator, self._pool, lambda: self.tracer, worked_s
        )
        self.rows = RowsTraffic(
            lambda: self.rank, workers, self.aggregator, self._terms, self._add, lambda: self.tracer
        )
        self.checkpoints = Checkpoints(
            lambda: self.rank, self._keys, self.rows.keys, self.aggregator, call_soon
        )
        self.rows.ended = self.checkpoints.rows_ended
        self.states = States(lambda: self.rank, self._find, self.aggregator, on_lost, fail)
        self.waiting = Waiting(
            self._keys, self.rows, self.values.pulls, self.aggregator, workers, self._departed
        )
        self._stopped = False

    # What workers say of their slices.

    def set_terms(self, from_round: int, terms: Terms) -> bool:
        """Sets the terms from a round on; False if they are known already.

        Raises ProtocolError when it contradicts an earlier announcement, and when a key would have
        too many slices.
        """
        for key in self._keys.values():
            key.check_slices(terms.slice_size)
        return self._terms.set(from_round, terms)

    def declare(self, declared: DeclaredKey) -> None:
        """Keeps a key from now on; ProtocolError when another worker has declared it otherwise.

        Ends the job if the key's layout, a codec or its consistency is not known here.
        """
        if self._terms.generation(INITIAL_ROUND) < 0:
            raise ProtocolError("it has not said how large slices are")
        if self.rank not in dict(declared.runs):
            raise ProtocolError(f"server {self.rank} keeps nothing of key {declared.key!r}")
        try:
            consistency = consistency_of_key(declared.consistency, self.aggregator.consistency)
            if LAYOUTS.find(declared.layout).touched_only:
                self.rows.declare(declared, consistency)
                return
            key = ServerKey(declared, self.rank, self._terms, consistency)
        except ConfigError as error:
            self._fail(str(error), UNKNOWN, "ConfigError")
            return
        key.check_slices(self._terms.smallest_slice_size)
        if self._keys.setdefault(declared.key_id, key).declared != declared:
            raise ProtocolError(f"it declares a key otherwise than another worker: {declared}")

    def land_push(self, connection: Connection, header: Header) -> Landing:
        """Where a push is received; ProtocolError for a push that can't be right."""
        key = self._key(header)
        state = key.state(header.round, header.slice, header.rank)
        if header.flags & (IN_HOST_SUM | NO_GRADIENT):
            if header.payload_bytes:
                instead = (
                    "without a gradient"
                    if header.flags & NO_GRADIENT
                    else "besides those in its host's sum"
                )
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {state.name()} {instead}"
                )
            return Landing(None, partial(self._pushed, connection, header, key, state, None))
        if header.flags & ENCODED and header.flags & CARRIES:
            raise ProtocolError(f"it sent an encoded sum of {state.name()}")
        if header.flags & ENCODED:
            gradient = self._buffer_of_encoded(state, header)
            memory = gradient.bytes[: header.payload_bytes]
        else:
            if header.payload_bytes != state.length * state.dtype.itemsize:
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {state.name()} of {state.length} "
                    f"{state.dtype} elements"
                )
            gradient = self._pool.get(state.length, state.dtype)
            memory = gradient.bytes
        arrived = partial(self._pushed, connection, header, key, state, gradient)
        return Landing(memory, traced_arrival(self.tracer, header, arrived))

    def land_pull(self, connection: Connection, header: Header) -> Landing:
        """Queues a request for a key's value."""
        return Landing(None, partial(self._add, connection, header, None))

    def _buffer_of_encoded(self, state: SliceState, header: Header) -> Buffer:
        codec = state.codecs.gradients
        most_bytes = 0 if codec.in_place else codec.most_bytes(state.length)
        if header.payload_bytes > most_bytes or header.round == INITIAL_ROUND:
            raise ProtocolError(
                f"it sent {header.payload_bytes} encoded bytes for {state.name()} in round "
                f"{header.round}, for which at most {most_bytes} are right"
            )
        return self._pool.get(most_bytes, np.dtype(np.uint8))

    def _pushed(
        self,
        connection: Connection,
        header: Header,
        key: ServerKey,
        state: SliceState,
        gradient: Optional[Buffer],
    ) -> None:
        ready_s = self._readiness.ready_s(header.rank, header.time_us)
        self._add(connection, header, _Push(key, state, gradient, ready_s))

    def _add(self, connection: Connection, header: Header, push: Union[_Push, _Act, None]) -> None:
        if push is not None:
            self._workers.pushed(header.rank, header.round)
            self._waiting_bytes += header.payload_bytes
        self._queue_frame(connection, header, push)

    def _queue_frame(
        self, connection: Connection, header: Header, push: Union[_Push, _Act, None]
    ) -> None:
        self._waiting_frames[header.rank] += 1
        self._queue.push(urgency(header.step, header.priority), (connection, header, push))

    # Steps whose gradients are clipped.

    def begin_clipped(self, step: int) -> None:
        """Holds a step's rounds until worker rank 0 has said how its gradients are scaled."""
        self.clipping.begin(step)
        self.aggregator.leavers.clips = True

    def scaled(self, connection: Connection, step: int, scale: float) -> None:
        """Has the rounds of a step end, by urgency: worker rank 0 has said how its gradients are
        scaled."""
        for state in self.clipping.scaled(step, scale):
            self._queue_end(connection, 0, state, step)

    def _queue_end(self, connection: Connection, rank: int, state: SliceState, step: int) -> None:
        """Has the complete rounds of a slice end, by urgency, as if a worker's push had come."""
        round_ = state.round + 1
        header = Header(
            Kind.PUSH, 0, rank, state.key.key_id, state.index, round_, step,
            state.open_rounds[round_].priority, state.length * state.dtype.itemsize,
        )  # fmt: skip
        push = _Push(self._keys[header.key], state, None, counts=False)
        self._queue_frame(connection, header, push)

    def _send_squares(self, step: int, squares: List[float]) -> None:
        connection = self._workers.connections[0]
        words = memoryview(encode(Squares(squares)))
        header = pack_header(Kind.SQUARES, self.rank, step=step, payload_bytes=len(words))
        if self._workers.listens(connection):
            connection.writer.push(URGENT, header, words)

    # What the consumer does with them.

    def consume(self) -> bool:
        """Handles the most urgent frame, and more if frames are tiny or too many bytes wait.

        Returns whether frames are left. The loop calls it between two looks at the connections.
        """
        handled_bytes = 0
        while self._queue.heap and not self._stopped:
            connection, header, push = self._queue.pop()
            handled_bytes += HEADER_BYTES + header.payload_bytes
            if push is None:
                self._pull(connection, header)
            else:
                if isinstance(push, _Push):
                    self._push(connection, header, push)
                else:
                    self._act(connection, header, push)
            self._waiting_frames[header.rank] -= 1
            if self._departed(header.rank):
                self.worker_left(header.rank)
            if handled_bytes >= _BATCH_BYTES and self._waiting_bytes <= _MOST_WAITING_BYTES:
                break
        return bool(self._queue.heap) and not self._stopped

    def optimizer_is_set(self, store: int) -> None:
        """Ends the rounds that have waited for the optimizer: those that are a worker's own."""
        for key in self._keys.values():
            if key.own_rounds and key.declared.store == store:
                for state in key.all_states():
                    self._end_rounds(key, state)
        self.rows.optimizer_is_set(store)

    @property
    def queued_frames(self) -> int:
        """Frames that wait to be handled; from any thread."""
        return len(self._queue)

    def stop(self) -> None:
        """Handles no frame any more: the job is about to fail, and values would be wrong."""
        self._stopped = True

    def _push(self, connection: Connection, header: Header, push: _Push) -> None:
        start_ns = now_ns()
        ended = 0
        key, state, gradient, ready_s, counts = push
        try:
            if counts:
                self._add_up(header, state, gradient, ready_s)
            if gradient is not None:
                trace_sum(self.tracer, header, start_ns)
            ended = newly_ended = self._end_rounds(key, state)
            # What had come for slices of another size may end at once, and be all of that size.
            while newly_ended:
                optimizer = self.aggregator.optimizers.get(key.declared.store)
                resliced = key.reslice(self._pool, optimizer)
                newly_ended = 0
                for other in resliced:
                    newly_ended += self._end_rounds(key, other)
                    self.values.answer_pulls(other)
            if ended and self.states.waiting:
                self.states.round_ended(key)
        except ProtocolError as error:
            self._on_lost(connection, str(error))
            return
        except NotFinite as error:
            self._not_finite(error)
            return
        except Exception as error:  # noqa: BLE001  the optimizer's own
            self._optimizer_failed(state.name(), header.round, error)
            return
        if not ended and self._workers.done:
            self.waiting.check(state)

    def _add_up(
        self, header: Header, state: SliceState, gradient: Optional[Buffer], ready_s: float
    ) -> None:
        """Counts a worker's push, and adds what it brings."""
        rank, round_, flags = header.rank, header.round, header.flags
        wants_result = bool(flags & WANTS_RESULT)
        self._waiting_bytes -= header.payload_bytes
        aggregator = self.aggregator
        if flags & IN_HOST_SUM:
            carries = bool(flags & CARRIES)
            aggregator.push_in_host_sum(state, rank, round_, wants_result, header.step, carries)
        elif flags & CARRIES:
            aggregator.push_host_sum(state, rank, round_, gradient, wants_result, header.priority)
            return  # the worker was counted before
        elif gradient is None:
            aggregator.push_no_gradient(
                state, rank, round_, wants_result, header.priority, header.step
            )
        else:
            encoded = gradient.bytes[: header.payload_bytes] if flags & ENCODED else None
            aggregator.push(
                state, rank, round_, gradient, wants_result, header.priority, header.step, encoded
            )
        current = state.open_rounds.get(round_)
        if current is not None:  # else the round is this worker's own
            self.lateness.pushed(current, rank, ready_s)

    def _act(self, connection: Connection, header: Header, act: _Act) -> None:
        """Does what a frame of a key of rows asks for."""
        self._waiting_bytes -= header.payload_bytes
        key = self.rows.keys[header.key]
        start_ns = now_ns()
        try:
            ended = act()
            if header.kind == Kind.PUSH_ROWS:
                trace_sum(self.tracer, header, start_ns)
            if ended and self.states.waiting:
                self.states.round_ended(key)
        except ProtocolError as error:
            self._on_lost(connection, str(error))
        except NotFinite as error:
            self._not_finite(error)
        except Exception as error:  # noqa: BLE001  the optimizer's own
            self._optimizer_failed(key.name(), header.round, error)
        else:
            if not ended and self._workers.done:
                self.waiting.check(key)
                self.waiting.check_initial_values()

    def _not_finite(self, error: NotFinite) -> None:
        self.stop()
        if error.rank == UNKNOWN:
            self._fail(str(error), error.round, "NotFiniteError")
        else:
            self._workers.suspect(error.rank, str(error), _NOT_FINITE, error="NotFiniteError")

    def _optimizer_failed(self, name: str, round_: int, error: Exception) -> None:
        _log.exception("the optimizer failed")
        self.stop()
        self._fail(f"the optimizer failed on {name}: {in_one_line(error)}", round_)

    def _end_rounds(self, key: ServerKey, state: SliceState) -> int:
        """Ends the complete rounds of a slice; queues each result before it ends the next round."""
        ended, start_ns = 0, now_ns()
        for result in self.aggregator.end_rounds(state):
            trace_update(self.tracer, result, start_ns)
            if self.checkpoints.open is not None:
                self.checkpoints.slice_ended(result.state)
            self.values.send_result(result)
            self.values.answer_pulls(result.state)
            if result.others and key.all_ended(result.round, result.others[0]):
                self.values.tell_ended(key, result)
            ended += 1
            if result.state is not state:
                self.values.send_early_results(result.state)
            start_ns = now_ns()
        self.values.send_early_results(state)
        return ended

    def _pull(self, connection: Connection, header: Header) -> None:
        try:
            states = self._key(header).states(header.round, header.rank)
        except ProtocolError as error:
            self._on_lost(connection, str(error))
            return
        for state in states:
            self.values.answer(state, Pull(connection, header, time.monotonic()))
        if self._workers.done:
            self.waiting.check_initial_values()

    # Workers that have left.

    def worker_left(self, rank: int) -> None:
        """To be called when a worker may have left: it has, when all its frames are handled.

        Rounds then go on without it, if the job lets workers leave. Else, and where they can't, the
        job ends if a round waits for a worker that has left.
        """
        if self.waiting.workers_may_leave and self._departed(rank):
            self._go_on_without(rank)
        self.waiting.check_all()

    def _go_on_without(self, rank: int) -> None:
        leavers, connection = self.aggregator.leavers.ranks, self._workers.connections[rank]
        if rank in leavers:
            return
        leavers.add(rank)
        for key in self._keys.values():
            for state in key.all_states():
                following = state.open_rounds.get(state.round + 1)
                if following is not None:
                    self._queue_end(connection, rank, state, following.step)
        for key_id, rows in self.rows.keys.items():
            waiting = rows.open_rounds.get(rows.round + 1)
            if waiting is not None:
                header = Header(
                    Kind.PUSH_ROWS, 0, rank, key_id, 0, waiting.round, waiting.step, 0, 0
                )
                self._queue_frame(connection, header, partial(self.rows.end_rounds, rows))

    def _departed(self, rank: int) -> bool:
        """Whether no more push of a worker comes. Its BYE overtakes its pushes in the queue."""
        return rank in self._workers.done and not self._waiting_frames[rank]

    def _find(self, key_id: int) -> Union[ServerKey, RowsKey, None]:
        return self._keys.get(key_id) or self.rows.keys.get(key_id)

    def _key(self, header: Header) -> ServerKey:
        key = self._keys.get(header.key)
        if key is None:
            raise ProtocolError(f"worker {header.rank} speaks of key {header.key}, unknown here")
        return key
