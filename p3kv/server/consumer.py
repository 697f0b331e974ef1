"""The consumer takes the most urgent of the frames that have been received, and handles it.

It adds a slice to its round's sum. When the round is complete, it updates the slice and queues the
value to every worker that wants it (P3 section 4.2).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Callable, Collection, List, Optional, Union

import msgspec
import numpy as np

from p3kv.checkpoints import Place
from p3kv.common.finite import ADVICE, NotFinite
from p3kv.common.tracing import SUM, UNKNOWN, UPDATE, Span, Tracer, now_ns
from p3kv.consistency import make_consistency
from p3kv.errors import ProtocolError, in_one_line
from p3kv.server.engine import Ended, Engine, Key, ServerSlice, Unit
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.held_rounds import HeldRounds
from p3kv.server.engine.plan import Rules
from p3kv.server.engine.rounds import Round
from p3kv.server.lateness import Lateness, Readiness
from p3kv.server.optimizer import Optimizer
from p3kv.server.saving.checkpoints import Checkpoints
from p3kv.server.state_service import StateService
from p3kv.server.waiting import Waiting
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import (
    EndedHeader,
    PulledHeader,
    PullHeader,
    PushHeader,
    SliceValueHeader,
    StepHeader,
    UpdatedHeader,
)
from p3kv.wire.framing import Frame, PriorityQueue, urgency
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    EXACT,
    HAS_VALUE,
    HEADER_BYTES,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    WANTS_RESULT,
    Kind,
    clock_us,
)
from p3kv.wire.loop import Loop
from p3kv.wire.messages import JobSettings, Squares, encode
from p3kv.wire.spans import span, trace_arrival, traced

_log = logging.getLogger(__name__)

_BATCH_BYTES = 16 * 1024
"""Bytes of frames handled before the loop looks at sockets again: one slice, or many tiny tensors
that arrived together, whose values leave together."""
_MOST_WAITING_BYTES = 48 << 20
"""Received pushes that may wait: enough to choose from, few compared with the weights."""


class Received(msgspec.Struct):
    """A frame that waits until it is the most urgent."""

    act: Callable[[Any], None]
    """What handles it then, given this."""
    connection: Connection
    header: Any
    """A `QueuedHeader`."""
    unit: Optional[Unit] = None
    """Unit that it changes, if any."""
    payload: Any = None
    size_bytes: int = 0
    """Memory that it takes while it waits."""
    ready_s: float = 0.0
    """Of a slice that is pushed: when the gradient was ready."""
    since_ns: int = 0
    """When its header came, of a frame that is traced."""


class _Value(Frame):
    """A slice's value, whose buffer stays as it is until it has arrived."""

    __slots__ = ("buffer",)
    buffer: Buffer

    def arrived(self) -> None:
        self.buffer.end_send()


class _LateValue(_Value):
    """One that is encoded for its worker alone, when it begins to leave."""

    __slots__ = ("make",)
    make: Callable[[], memoryview]

    def begin(self) -> memoryview:
        return self.make()


class Consumer:
    """Sums, updates and sends back, the most urgent first.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        place: Place,
        job: JobSettings,
        workers: Workers,
        lateness: Lateness,
        loop: Loop,
        tracer: Tracer,
        fail: Callable[..., None],
    ) -> None:
        """`fail(reason, round, error)` ends the job; `error` names a class in p3kv.errors.

        Raises ConfigError if the job's consistency is not known here, and if checkpoints can't be
        written.
        """
        self.held_rounds: HeldRounds[Unit] = HeldRounds(
            partial(_send_squares, place.rank, workers), job.deterministic
        )
        num_workers = len(place.workers_hosts)
        rules = Rules(
            place.rank, make_consistency(job.consistency, num_workers), self.held_rounds,
            job.deterministic, job.check_finite, job.leave_zero_rows_out, loop.drain.link_s,
        )  # fmt: skip
        self.engine = Engine(rules)
        self.queue: PriorityQueue[Received] = PriorityQueue()
        """The paper's second queue."""
        self._waiting_bytes = 0
        self.waiting = Waiting(self.engine, workers, job.let_workers_leave)
        self.states = StateService(self.engine, workers, fail)
        self.checkpoints = Checkpoints(
            place, job.checkpoint_dir, self.engine.keys, rules.leavers.gone, workers, loop
        )
        self._rank = place.rank
        self._workers = workers
        self._num_workers = num_workers
        self._workers_may_leave = job.let_workers_leave
        self._pool = rules.pool
        self._lateness = lateness
        self._readiness = Readiness(num_workers)
        self._loop = loop
        self._worked_us = 0
        """For how long this server had worked when it began to handle frames."""
        self.tracer = tracer
        self._fail = fail
        self._stopped = False

    # What waits for its turn.

    def add(self, received: Received) -> None:
        """Queues a frame."""
        header = received.header
        self._waiting_bytes += received.size_bytes
        self._workers.queued[header.rank] += 1
        self.queue.push(urgency(header.step, header.priority), received)

    def add_push(self, received: Received) -> None:
        """Queues a frame of a push, or of a request for rows, which tells how far a worker is."""
        header = received.header
        if header.round > self._workers.last_round[header.rank]:
            self._workers.last_round[header.rank] = header.round
        self.add(received)

    def consume(self) -> bool:
        """Handles the most urgent frame, and more if frames are tiny or too many bytes wait.

        Returns whether frames are left. The loop calls it between two looks at the connections.
        """
        queue, workers = self.queue, self._workers
        handled_bytes = 0
        if queue.heap:
            self._worked_us = clock_us(self._loop.worked_s)
        while queue.heap and not self._stopped:
            received = queue.pop()
            header = received.header
            handled_bytes += HEADER_BYTES + header.payload_bytes
            self._waiting_bytes -= received.size_bytes
            try:
                received.act(received)
            except ProtocolError as error:
                workers.lose(received.connection, str(error))
            except NotFinite as error:
                self._not_finite(error)
            except Exception as error:
                if received.unit is None:
                    raise
                self._optimizer_failed(received.unit.name, header.round, error)
            workers.queued[header.rank] -= 1
            if workers.done and workers.departed(header.rank):
                self.worker_left(header.rank)
            if handled_bytes >= _BATCH_BYTES and self._waiting_bytes <= _MOST_WAITING_BYTES:
                break
        return bool(queue.heap) and not self._stopped

    def stop(self) -> None:
        """Handles no frame any more: the job is about to fail, and values would be wrong."""
        self._stopped = True

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

    # What holds for a whole store, or the whole job.

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Has a store's optimizer make values from now on; ends the rounds that have waited for
        it."""
        for unit in self.engine.set_optimizer(store, optimizer):
            self.settle(unit)

    def forget(self, store: int) -> None:
        """Forgets a store's keys, of which all rounds have ended for all workers."""
        for unit in [one for one in self.waiting.pulls if one.plan.declared.store == store]:
            del self.waiting.pulls[unit]
        self.engine.forget(store)

    def scaled(self, step: int, scale: float) -> None:
        """Has the rounds of a step end, by urgency: worker rank 0 has said how its gradients are
        scaled."""
        for unit in self.held_rounds.scaled(step, scale):
            self._queue_end(0, unit, step, unit.ledger.open[unit.round + 1].priority)

    def worker_left(self, rank: int) -> None:
        """To be called when a worker may have left: it has, when all its frames are handled.

        Rounds then go on without it, if the job lets workers leave. Else, and where they can't, the
        job ends if a round waits for a worker that has left.
        """
        if self._workers_may_leave and self._workers.departed(rank):
            for unit, following in self.engine.leave(rank):
                self._queue_end(rank, unit, following.step, following.priority)
        if self._workers.departed(rank):
            self.engine.rules.leavers.gone.add(rank)
            for unit in self.checkpoints.worker_left():
                self.settle(unit)
        self.waiting.check_all()

    def let_workers_leave(self) -> None:
        """Has rounds go on without workers that leave, whatever the settings say."""
        self._workers_may_leave = self.waiting.workers_may_leave = True
        for rank in range(self._num_workers):
            if self._workers.departed(rank):
                self.worker_left(rank)

    def _queue_end(self, rank: int, unit: Unit, step: int, priority: int) -> None:
        """Queues what ends the complete rounds of a unit, as if a worker's push had come."""
        header = PushHeader(
            Kind.PUSH, rank, payload_bytes=unit.size_elems * unit.plan.dtype.itemsize,
            key=unit.plan.key_id, round=unit.round + 1, step=step, priority=priority,
        )  # fmt: skip
        self.add(Received(self._end, self._workers.connections[rank], header, unit))

    def _end(self, received: Received) -> None:
        assert received.unit is not None
        self.settle(received.unit)

    # Slices that workers push.

    def land_push(self, connection: Connection, header: PushHeader) -> Landing:
        """Lands a slice in a buffer; ProtocolError for a push that can't be right."""
        key = self.engine.key_of_slices(header.key, header.rank)
        slice_, flags = key.slice_at(header.round, header.slice, header.rank), header.flags
        received = Received(
            self._push, connection, header, slice_, None, size_bytes=header.payload_bytes
        )
        if flags & (IN_HOST_SUM | NO_GRADIENT) and flags & (CARRIES | NO_GRADIENT) != CARRIES:
            if header.payload_bytes:
                instead = (
                    "without a gradient"
                    if flags & NO_GRADIENT
                    else "besides those in its host's sum"
                )
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {slice_.name} {instead}"
                )
            return None, received
        gradient = received.payload = self._buffer(slice_, header)
        memory = gradient.bytes[: header.payload_bytes] if flags & ENCODED else gradient.bytes
        if self.tracer.enabled:
            received.since_ns = now_ns()
        return memory, received

    def _buffer(self, slice_: ServerSlice, header: PushHeader) -> Buffer:
        """Memory for a slice's gradient, of its elements or of the bytes that its codec reads."""
        plan, size_bytes = slice_.plan, header.payload_bytes
        if header.flags & ENCODED:
            codec = plan.codecs.gradients
            most_bytes = codec.most_bytes(slice_.length)
            if size_bytes > most_bytes or header.round == INITIAL_ROUND:
                raise ProtocolError(
                    f"it sent {size_bytes} encoded bytes for {slice_.name} in round "
                    f"{header.round}, for which at most {most_bytes} are right"
                )
            return self._pool.get(most_bytes, _BYTE)
        dtype = plan.dtype
        if size_bytes != slice_.size_bytes:
            dtype = plan.sum_dtype  # a host's sum may be wider than a gradient
            if size_bytes != slice_.length * dtype.itemsize:
                raise ProtocolError(
                    f"it sent {size_bytes} bytes for {slice_.name} of {slice_.length} "
                    f"{plan.dtype} elements"
                )
        return self._pool.get(slice_.length, dtype)

    def take_push(self, connection: Connection, header: PushHeader, received: Received) -> None:
        """Queues a slice that has arrived."""
        if received.since_ns:
            trace_arrival(self.tracer, header, received.since_ns)
        received.ready_s = self._readiness.ready_s(header.rank, header.ready_us)
        self.add_push(received)

    def _push(self, received: Received) -> None:
        header, slice_, gradient = received.header, received.unit, received.payload
        assert isinstance(slice_, ServerSlice)
        start_ns = now_ns() if self.tracer.enabled else 0
        if header.flags & (IN_HOST_SUM | CARRIES | ENCODED):
            current = self._counted(header, slice_, gradient)
        else:
            current = self.engine.push(
                slice_, header.rank, header.round, gradient, bool(header.flags & WANTS_RESULT),
                header.priority, header.step,
            )  # fmt: skip
        counted = current or slice_.ledger.open.get(header.round)  # before, of a host's sum
        if counted is not None:
            if gradient is not None:
                counted.lacking &= header.lacking
            if header.flags & HAS_VALUE:
                bare = header.flags & NO_GRADIENT
                (counted.have_value if bare else counted.have_last).add(header.rank)
        if current is not None:
            current.exact |= bool(header.flags & EXACT)
            self._lateness.note_push(current, header.rank, received.ready_s)
        if start_ns and gradient is not None:
            self.trace_sum(header, start_ns)
        # Most pushes are not the last one of a round.
        if current is None or self._workers.done or slice_.ledger.may_end(current):
            self.settle(slice_)

    def _counted(
        self, header: PushHeader, slice_: ServerSlice, gradient: Optional[Buffer]
    ) -> Optional[Round]:
        """Counts a worker's push, and adds what it brings; None where the worker was counted
        before."""
        rank, round_, flags = header.rank, header.round, header.flags
        wants_result = bool(flags & WANTS_RESULT)
        engine = self.engine
        current = None
        if flags & IN_HOST_SUM:
            current = engine.push_in_host_sum(slice_, rank, round_, wants_result, header.step)
            if not flags & CARRIES:
                return current
        encoded = None
        if gradient is not None and flags & ENCODED:
            encoded = gradient.bytes[: header.payload_bytes]
        if flags & CARRIES:
            engine.push_host_sum(
                slice_, rank, round_, gradient, wants_result, header.priority, header.workers,
                encoded,
            )  # fmt: skip
            return current
        return engine.push(
            slice_, rank, round_, gradient, wants_result, header.priority, header.step, encoded
        )

    def trace_sum(self, header: Any, start_ns: int) -> None:
        """Records that a worker's frame has been added to its round since `start_ns`."""
        self.tracer.span(span(SUM, header, start_ns, start_ns, header.rank, header.payload_bytes))

    # Values that workers ask for.

    def take_pull(self, connection: Connection, header: PullHeader, _: None) -> None:
        """Queues a request for a key's value."""
        self.add(Received(self._pull, connection, header))

    def _pull(self, received: Received) -> None:
        header = received.header
        key = self.engine.key_of_slices(header.key, header.rank)
        key.check_ahead(header.round, header.rank)
        for slice_ in key.slices(header.round):
            answer = partial(self._answer_pull, received.connection, header, slice_)
            self.waiting.pull(slice_, header, answer)
        self.waiting.check_initial_values()

    def _answer_pull(self, connection: Connection, header: PullHeader, slice_: ServerSlice) -> None:
        """Answers a pull with a slice's value, which is new enough."""
        if not self._workers.listens(connection):
            return
        # The worker finds where the slice belongs by a round of the slice's generation. A value
        # that was re-sliced is of the round before its generation's first. Where rounds are each
        # worker's own, all slices are of the first generation.
        own = slice_.plan.consistency.own_rounds
        round_ = header.round if own else max(slice_.round, slice_.first_round)
        buffer, payload, encoded = slice_.wire(header.rank, False, bool(header.flags & EXACT))
        answer = PulledHeader(
            Kind.PULLED, self._rank, encoded, key=slice_.plan.key_id, slice=slice_.index,
            round=round_, request=header.request, priority=header.priority,
            worked_us=self._worked_us,
            late_us=slice_.late_us(header.rank, round_),
        )  # fmt: skip
        urgent = urgency(header.step, header.priority)
        self._send_value(header.rank, urgent, answer, buffer, payload)

    # Rounds that end.

    def settle(self, unit: Unit) -> None:
        """Ends the complete rounds of a unit, after what may have made them complete."""
        key = self.engine.keys[unit.plan.key_id]
        ended = newly_ended = self._end_rounds(key, unit)
        # What had come for slices of another size may end at once, and be all of that size.
        while newly_ended:
            newly_ended = 0
            for other in key.reslice():
                newly_ended += self._end_rounds(key, other)
                self.waiting.answer_pulls(other)
        if ended and self.states.waiting:
            self.states.round_ended(key)
        if not ended and self._workers.done:
            self.waiting.check(unit)

    def _end_rounds(self, key: Key, unit: Unit) -> int:
        """Ends the complete rounds of a unit; queues each result before it ends the next round."""
        traces = self.tracer.enabled
        count, start_ns = 0, now_ns() if traces else 0
        for ended in self.engine.end_rounds(unit):
            if traces:
                self._trace_update(ended, start_ns)
                start_ns = now_ns()
            if self.checkpoints.waits_for_rounds:
                self.checkpoints.unit_ended(ended.unit)
            self._answer(key, ended)
            count += 1
        if unit.ledger.unanswered:
            for answer in self.engine.answers(unit):
                self._answer(key, answer)
        return count

    def _answer(self, key: Key, ended: Ended) -> None:
        """Queues a round's value to the workers that want it."""
        if isinstance(ended.unit, ServerSlice) and ended.wanting:
            self._send_result(ended.unit, ended)
        if self.waiting.pulls:
            self.waiting.answer_pulls(ended.unit)
        if ended.others and key.all_ended(ended.round, ended.others[0]):
            self._tell_ended(ended)

    def _send_result(self, slice_: ServerSlice, ended: Ended) -> None:
        """Queues a slice's value to the workers that want it; to those that have it, or of a sum
        that nobody has added to, only that it has not changed."""
        flags = 0
        have_it: Collection[int] = ()
        if ended.no_gradient:
            flags = NO_GRADIENT
            if slice_.plan.optimizer is None:
                have_it = ended.wanting
            elif slice_.travels_as_it_is:
                have_it = ended.have_value
        urgent, own = urgency(ended.step, ended.priority), slice_.plan.consistency.own_rounds
        behind = slice_.ledger.behind(ended.round) if own else 0
        for rank in ended.wanting:
            connection = self._workers.connections[rank]
            if connection.closed or rank in self._workers.done:
                continue
            buffer, payload, encoded, worked_us, late_us = None, None, 0, 0, 0
            if rank not in have_it:
                buffer, payload, encoded = slice_.wire(
                    rank, True, ended.exact, rank in ended.have_last
                )
                worked_us, late_us = self._worked_us, slice_.late_us(rank, ended.round)
            header = UpdatedHeader(
                Kind.UPDATED, self._rank, flags | encoded, key=slice_.plan.key_id,
                slice=slice_.index, round=ended.round, step=ended.step, priority=ended.priority,
                behind=behind, worked_us=worked_us, late_us=late_us,
            )  # fmt: skip
            if buffer is None or payload is None:
                connection.writer.push(Frame(urgent, header))
            else:
                self._send_value(rank, urgent, header, buffer, payload)

    def _send_value(
        self,
        rank: int,
        urgent: int,
        header: SliceValueHeader,
        buffer: Buffer,
        payload: Union[memoryview, Callable[[], memoryview]],
    ) -> None:
        """Queues a value as it travels, which the buffer has."""
        if isinstance(payload, memoryview):
            frame = _Value(urgent, header, payload)
        else:
            frame = late = _LateValue(urgent, header)
            late.make = payload
        frame.buffer = buffer
        buffer.begin_send()
        queued = traced(self.tracer, frame, rank) if self.tracer.enabled else frame
        self._workers.connections[rank].writer.push(queued)

    def _tell_ended(self, ended: Ended) -> None:
        """Tells workers that a round has ended, where no result does: their windows move on."""
        header = EndedHeader(
            Kind.ENDED, self._rank, NO_GRADIENT if ended.no_gradient else 0,
            key=ended.unit.plan.key_id, round=ended.round, step=ended.step,
        )  # fmt: skip
        for rank in ended.others:
            connection = self._workers.connections[rank]
            if self._workers.listens(connection):
                connection.writer.push(Frame(URGENT, header))

    def _trace_update(self, ended: Ended, start_ns: int) -> None:
        """Records that a slice's round has been ended since `start_ns`."""
        slice_ = ended.unit
        if isinstance(slice_, ServerSlice):
            self.tracer.span(
                Span(
                    UPDATE, slice_.plan.key_id, start_ns, start_ns, now_ns(), UNKNOWN,
                    ended.round, ended.step, slice_.index, ended.priority, slice_.size_bytes,
                )
            )  # fmt: skip


def _send_squares(rank: int, workers: Workers, step: int, squares: List[float]) -> None:
    words = memoryview(encode(Squares(squares)))
    workers.tell_rank_0(StepHeader(Kind.SQUARES, rank, step=step), words)


_BYTE = np.dtype(np.uint8)
