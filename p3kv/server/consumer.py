"""The paper's second queue: received slices wait by urgency, and the consumer handles them.

The consumer takes the most urgent slice from the queue and adds it to its round's sum. When the
round is complete, it updates the slice and queues the value to every worker that wants it (P3
section 4.2).
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Callable, List, NamedTuple, Optional

import numpy as np

from p3kv.common.finite import ADVICE, NotFinite
from p3kv.common.trace import Tracer, now_ns
from p3kv.config import Launch
from p3kv.consistency import BulkSynchronous
from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.server.checkpoints import Checkpoints
from p3kv.server.engine import Ended, Engine, Key, RowsKey, ServerKey, ServerSlice, Unit
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.held_rounds import HeldRounds
from p3kv.server.engine.rounds import Round
from p3kv.server.lateness import Lateness, Readiness
from p3kv.server.optimizer import Optimizer
from p3kv.server.rows_consumer import RowsConsumer
from p3kv.server.spans import trace_sum, trace_update
from p3kv.server.state_service import StateService
from p3kv.server.values import Values
from p3kv.server.waiting import Pull, Waiting
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import KeyHeader, PullHeader, PushHeader, QueuedHeader, StepHeader
from p3kv.wire.framing import Frame, Landing
from p3kv.wire.header import (
    ENCODED,
    EXACT,
    HEADER_BYTES,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    WANTS_RESULT,
    Kind,
)
from p3kv.wire.messages import UNKNOWN, DeclaredKey, SliceSizes, Squares, encode
from p3kv.wire.queue import PriorityQueue, urgency
from p3kv.wire.slice_sizes import SliceSizesByRound
from p3kv.wire.spans import traced_arrival

_log = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 48 << 20
"""Received pushes that may wait: enough to choose from, few compared with the weights."""
_BATCH_BYTES = 16 * 1024
"""Bytes of frames handled before the loop looks at sockets again: one slice, or many tiny tensors
that arrived together, whose values leave together."""


class _Frame(NamedTuple):
    """Frame that waits in the queue."""

    connection: Connection
    header: QueuedHeader
    act: Callable[[], None]
    """Function to call when its turn comes."""
    unit: Optional[Unit]
    """Unit that it changes, if any."""
    waiting_bytes: int
    """Memory that it takes while it waits."""


class Consumer:
    """Sums, updates and sends back, the most urgent first.

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
        self.held_rounds: HeldRounds[Unit] = HeldRounds(self._send_squares)
        self.engine = Engine(BulkSynchronous(launch.num_workers), held_rounds=self.held_rounds)
        self._pool = self.engine.rules.pool
        self.lateness = Lateness(launch.num_workers)
        self._readiness = Readiness(launch.num_workers)
        self._workers = workers
        self._on_lost = on_lost
        self._fail = fail
        self._queue: PriorityQueue[_Frame] = PriorityQueue()
        self._waiting_bytes = 0
        self._waiting_frames = [0] * launch.num_workers
        """By rank, how many of the worker's frames are in the queue."""
        self._sizes = SliceSizesByRound()
        self.values = Values(lambda: self.rank, workers, lambda: self.tracer, worked_s)
        self.rows = RowsConsumer(
            lambda: self.rank, workers, self._rows_key, self._sizes, self._add, self._settle,
            self._asked, lambda: self.tracer,
        )  # fmt: skip
        self.checkpoints = Checkpoints(lambda: self.rank, self.engine.keys, call_soon)
        self.states = StateService(lambda: self.rank, self._key, on_lost, fail)
        self.waiting = Waiting(self.engine, self.rows, self.values.pulls, workers, self._departed)
        self._stopped = False

    # What workers say of their slices.

    def set_slice_sizes(self, from_round: int, sizes: SliceSizes) -> bool:
        """Sets the slice sizes from a round on; False if they are known already.

        Raises ProtocolError when it contradicts an earlier announcement, and when a key would have
        too many slices.
        """
        self.engine.check_slices(sizes.slice_size)
        return self._sizes.set(from_round, sizes)

    def declare(self, declared: DeclaredKey) -> None:
        """Keeps a key from now on; ProtocolError when another worker has declared it otherwise.

        Ends the job if the key's layout, a codec or its consistency is not known here.
        """
        if self._sizes.generation(INITIAL_ROUND) < 0:
            raise ProtocolError("it has not said how large slices are")
        if self.rank not in dict(declared.runs):
            raise ProtocolError(f"server {self.rank} keeps nothing of key {declared.key!r}")
        try:
            key = self.engine.declare(declared, self.rank, self._sizes)
        except ConfigError as error:
            self._fail(str(error), UNKNOWN, "ConfigError")
            return
        if isinstance(key, RowsKey):
            self.rows.serve(key)

    def land_push(self, connection: Connection, header: PushHeader) -> Landing:
        """Where a push is received; ProtocolError for a push that can't be right."""
        key = self._key_of_slices(header)
        state, plan = key.slice_at(header.round, header.slice, header.rank), key.plan
        flags, in_sum = header.flags, header.IN_HOST_SUM | NO_GRADIENT
        if flags & in_sum and flags & (header.CARRIES | NO_GRADIENT) != header.CARRIES:
            if header.payload_bytes:
                instead = (
                    "without a gradient"
                    if flags & NO_GRADIENT
                    else "besides those in its host's sum"
                )
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {state.name} {instead}"
                )
            return Landing(None, partial(self._arrived, connection, header, state, None))
        if flags & ENCODED:
            gradient = self._buffer_of_encoded(state, header)
            memory = gradient.bytes[: header.payload_bytes]
        else:
            dtype = plan.dtype
            if header.payload_bytes != state.length * dtype.itemsize:
                dtype = plan.sum_dtype  # a host's sum may be wider than a gradient
            if header.payload_bytes != state.length * dtype.itemsize:
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {state.name} of {state.length} "
                    f"{plan.dtype} elements"
                )
            gradient = self._pool.get(state.length, dtype)
            memory = gradient.bytes
        arrived = partial(self._arrived, connection, header, state, gradient)
        return Landing(memory, traced_arrival(self.tracer, header, arrived))

    def land_pull(self, connection: Connection, header: PullHeader) -> Landing:
        """Queues a request for a key's value."""
        return Landing(None, partial(self._ask, connection, header))

    def _buffer_of_encoded(self, state: ServerSlice, header: PushHeader) -> Buffer:
        codec = state.plan.codecs.gradients
        most_bytes = 0 if codec.in_place else codec.most_bytes(state.length)
        if header.payload_bytes > most_bytes or header.round == INITIAL_ROUND:
            raise ProtocolError(
                f"it sent {header.payload_bytes} encoded bytes for {state.name} in round "
                f"{header.round}, for which at most {most_bytes} are right"
            )
        return self._pool.get(most_bytes, np.dtype(np.uint8))

    def _arrived(
        self,
        connection: Connection,
        header: PushHeader,
        state: ServerSlice,
        gradient: Optional[Buffer],
    ) -> None:
        ready_s = self._readiness.ready_s(header.rank, header.ready_us)
        self._add(connection, header, partial(self._push, header, state, gradient, ready_s), state)

    def _ask(self, connection: Connection, header: PullHeader) -> None:
        self._queue_frame(
            _Frame(connection, header, partial(self._pull, connection, header), None, 0)
        )

    def _add(
        self, connection: Connection, header: QueuedHeader, act: Callable[[], None], unit: Unit
    ) -> None:
        """Queues a frame of a push, or of a request for rows."""
        self._workers.note_round(header.rank, header.round)
        self._waiting_bytes += header.payload_bytes
        self._queue_frame(_Frame(connection, header, act, unit, header.payload_bytes))

    def _queue_frame(self, frame: _Frame) -> None:
        self._waiting_frames[frame.header.rank] += 1
        self._queue.push(urgency(frame.header.step, frame.header.priority), frame)

    def _queue_end(
        self, connection: Connection, rank: int, unit: Unit, step: int, priority: int
    ) -> None:
        """Has the complete rounds of a unit end, by urgency, as if a worker's push had come."""
        header = PushHeader(
            Kind.PUSH, rank, payload_bytes=unit.size_elems * unit.plan.dtype.itemsize,
            key=unit.plan.key_id, round=unit.round + 1, step=step, priority=priority,
        )  # fmt: skip
        self._queue_frame(_Frame(connection, header, partial(self._settle, unit), unit, 0))

    # Steps whose gradients are clipped.

    def scaled(self, connection: Connection, step: int, scale: float) -> None:
        """Has the rounds of a step end, by urgency: worker rank 0 has said how its gradients are
        scaled."""
        for unit in self.held_rounds.scaled(step, scale):
            priority = unit.ledger.open[unit.round + 1].priority
            self._queue_end(connection, 0, unit, step, priority)

    def _send_squares(self, step: int, squares: List[float]) -> None:
        connection = self._workers.connections[0]
        header = StepHeader(Kind.SQUARES, self.rank, step=step)
        if self._workers.listens(connection):
            connection.writer.push(Frame(URGENT, header, memoryview(encode(Squares(squares)))))

    # What the consumer does with them.

    def consume(self) -> bool:
        """Handles the most urgent frame, and more if frames are tiny or too many bytes wait.

        Returns whether frames are left. The loop calls it between two looks at the connections.
        """
        handled_bytes = 0
        while self._queue.heap and not self._stopped:
            frame = self._queue.pop()
            rank = frame.header.rank
            self._waiting_bytes -= frame.waiting_bytes
            handled_bytes += HEADER_BYTES + frame.header.payload_bytes
            self._do(frame)
            self._waiting_frames[rank] -= 1
            if self._departed(rank):
                self.worker_left(rank)
            if handled_bytes >= _BATCH_BYTES and self._waiting_bytes <= _MOST_WAITING_BYTES:
                break
        return bool(self._queue.heap) and not self._stopped

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Has a store's optimizer make values from now on; ends the rounds that have waited for
        it."""
        for unit in self.engine.set_optimizer(store, optimizer):
            self._settle(unit)

    @property
    def queued_frames(self) -> int:
        """Frames that wait to be handled; from any thread."""
        return len(self._queue)

    def stop(self) -> None:
        """Handles no frame any more: the job is about to fail, and values would be wrong."""
        self._stopped = True

    def _do(self, frame: _Frame) -> None:
        try:
            frame.act()
        except ProtocolError as error:
            self._on_lost(frame.connection, str(error))
        except NotFinite as error:
            self._not_finite(error)
        except Exception as error:
            if frame.unit is None:
                raise
            self._optimizer_failed(frame.unit.name, frame.header.round, error)

    def _push(
        self,
        header: PushHeader,
        state: ServerSlice,
        gradient: Optional[Buffer],
        ready_s: float,
    ) -> None:
        start_ns = now_ns()
        current = self._counted(header, state, gradient)
        if current is not None:
            current.exact |= bool(header.flags & EXACT)
            self.lateness.note_push(current, header.rank, ready_s)
        if gradient is not None:
            trace_sum(self.tracer, header, start_ns)
        self._settle(state)

    def _counted(
        self, header: PushHeader, state: ServerSlice, gradient: Optional[Buffer]
    ) -> Optional[Round]:
        """Counts a worker's push, and adds what it brings; None where the worker was counted
        before."""
        rank, round_, flags = header.rank, header.round, header.flags
        wants_result = bool(flags & WANTS_RESULT)
        engine = self.engine
        current = None
        if flags & header.IN_HOST_SUM:
            current = engine.push_in_host_sum(state, rank, round_, wants_result, header.step)
            if not flags & header.CARRIES:
                return current
        encoded = None
        if gradient is not None and flags & ENCODED:
            encoded = gradient.bytes[: header.payload_bytes]
        if flags & header.CARRIES:
            engine.push_host_sum(
                state, rank, round_, gradient, wants_result, header.priority, header.workers,
                encoded,
            )  # fmt: skip
            return current
        if gradient is None:
            return engine.push_no_gradient(
                state, rank, round_, wants_result, header.priority, header.step
            )
        return engine.push(
            state, rank, round_, gradient, wants_result, header.priority, header.step, encoded
        )

    def _settle(self, unit: Unit) -> None:
        """Ends the complete rounds of a unit, after what may have made them complete."""
        key = self.engine.keys[unit.plan.key_id]
        ended = newly_ended = self._end_rounds(key, unit)
        # What had come for slices of another size may end at once, and be all of that size.
        while newly_ended:
            newly_ended = 0
            for other in key.reslice():
                newly_ended += self._end_rounds(key, other)
                self.values.answer_pulls(other)
        if ended and self.states.waiting:
            self.states.round_ended(key)
        if not ended and self._workers.done:
            self.waiting.check(unit)

    def _end_rounds(self, key: Key, unit: Unit) -> int:
        """Ends the complete rounds of a unit; queues each result before it ends the next round."""
        count, start_ns = 0, now_ns()
        for ended in self.engine.end_rounds(unit):
            trace_update(self.tracer, ended, start_ns)
            if self.checkpoints.open is not None:
                self.checkpoints.unit_ended(ended.unit)
            self._answer(key, ended)
            count += 1
            start_ns = now_ns()
        for answer in self.engine.answers(unit):
            self._answer(key, answer)
        return count

    def _answer(self, key: Key, ended: Ended) -> None:
        self._send_value(ended)
        if ended.others and key.all_ended(ended.round, ended.others[0]):
            self.values.tell_ended(ended)

    def _send_value(self, ended: Ended) -> None:
        """Queues a round's value to the workers that want it."""
        unit = ended.unit
        if isinstance(unit, RowsKey):
            self.rows.answer_pulls(unit)
        elif isinstance(unit, ServerSlice):
            self.values.send_result(unit, ended)
            self.values.answer_pulls(unit)

    def _not_finite(self, error: NotFinite) -> None:
        self.stop()
        if error.rank is None:
            self._fail(str(error), error.round, "NotFiniteError")
        else:
            self._workers.suspect(error.rank, str(error), ADVICE, error="NotFiniteError")

    def _optimizer_failed(self, name: str, round_: int, error: Exception) -> None:
        _log.exception("the optimizer failed")
        self.stop()
        self._fail(f"the optimizer failed on {name}: {in_one_line(error)}", round_)

    def _pull(self, connection: Connection, header: PullHeader) -> None:
        key = self._key_of_slices(header)
        key.check_ahead(header.round, header.rank)
        for state in key.slices(header.round):
            self.values.answer(state, Pull(connection, header, time.monotonic()))
        self._asked()

    def _asked(self) -> None:
        """Ends the job if what was asked for can't come any more."""
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
        connection = self._workers.connections[rank]
        for unit, following in self.engine.leave(rank):
            self._queue_end(connection, rank, unit, following.step, following.priority)

    def _departed(self, rank: int) -> bool:
        """Whether no more push of a worker comes. Its BYE overtakes its pushes in the queue."""
        return rank in self._workers.done and not self._waiting_frames[rank]

    def _key(self, header: KeyHeader) -> Key:
        key = self.engine.keys.get(header.key)
        if key is None:
            raise ProtocolError(f"worker {header.rank} speaks of key {header.key}, unknown here")
        return key

    def _key_of_slices(self, header: KeyHeader) -> ServerKey:
        key = self._key(header)
        if not isinstance(key, ServerKey):
            raise ProtocolError(f"worker {header.rank} speaks of slices of {key.plan.called}")
        return key

    def _rows_key(self, header: KeyHeader) -> RowsKey:
        key = self._key(header)
        if not isinstance(key, RowsKey):
            raise ProtocolError(f"worker {header.rank} speaks of rows of {key.plan.called}")
        return key
