"""The consumer takes the most urgent of the frames that have been received, and handles it.

It adds a slice to its round's sum. When the round is complete, it updates the slice and queues the
value to every worker that wants it (P3 section 4.2).
"""

from __future__ import annotations

import logging
from typing import Any, Collection, Iterator, Optional

import msgspec
import numpy as np

from p3kv.checkpoints import Place
from p3kv.common.finite import ADVICE, NotFinite
from p3kv.common.tracing import SUM, UNKNOWN, UPDATE, Span, Tracer, now_ns
from p3kv.consistency import make_consistency
from p3kv.errors import ProtocolError, in_one_line
from p3kv.server.engine import (
    Answer,
    Blame,
    Buffer,
    Command,
    Engine,
    LateBytes,
    Payload,
    Pull,
    Record,
    Round,
    RowsFrame,
    SendSquares,
    SendVotes,
    SentRows,
    ServerRows,
    ServerSlice,
    ServerState,
)
from p3kv.server.optimizer import Optimizer
from p3kv.server.saving.checkpoints import Checkpoints
from p3kv.server.state_service import StateService
from p3kv.server.stragglers import Lateness, Readiness
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import (
    EndedHeader,
    NormHeader,
    PulledHeader,
    PullHeader,
    PullRowsHeader,
    PushHeader,
    PushRowsHeader,
    RowsHeader,
    SliceValueHeader,
    StepHeader,
    UpdatedHeader,
)
from p3kv.wire.framing import Frame, PriorityQueue, urgency
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    EXACT,
    HEADER_BYTES,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    Kind,
    clock_us,
)
from p3kv.wire.loop import Loop
from p3kv.wire.messages import JobSettings, Squares, Vote, encode
from p3kv.wire.rows import NUMBER, check_frame, check_numbers, memory
from p3kv.wire.tracing import span, trace_arrival, traced

_log = logging.getLogger(__name__)

_BYTE = np.dtype(np.uint8)
_BATCH_BYTES = 16 * 1024
"""Bytes of frames handled before the loop looks at sockets again: one slice, or many tiny tensors
that arrived together, whose values leave together."""
_MOST_WAITING_BYTES = 48 << 20
"""Received pushes that may wait: enough to choose from, few compared with the weights."""


class Received(msgspec.Struct):
    """A frame that waits until it is the most urgent."""

    connection: Connection
    header: Any
    """A `QueuedHeader`."""
    record: Optional[Record[Any]] = None
    """What it changes, if anything."""
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

    __slots__ = ("late",)
    late: LateBytes

    def begin(self) -> memoryview:
        return self.late.made()


class _RowsFrame(Frame):
    """Rows of a value, which are copied when the first frame that has them begins to leave."""

    __slots__ = ("rows",)
    rows: SentRows

    def begin(self) -> memoryview:
        return self.rows.payload()

    def sent(self) -> None:
        self.rows.end_send()


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
    ) -> None:
        """Raises ConfigError for an unknown consistency, and where checkpoints can't be written."""
        num_workers = len(place.workers_hosts)
        state = ServerState(place.rank, make_consistency(job.consistency, num_workers), job)
        state.link_s = loop.drain.link_s
        self.engine = Engine(state)
        self.queue: PriorityQueue[Received] = PriorityQueue()
        """The paper's second queue."""
        self._waiting_bytes = 0
        self.states = StateService(self.engine, workers)
        self.checkpoints = Checkpoints(
            place, job.checkpoint_dir, self.engine.keys, state.gone, workers, loop
        )
        self._rank = place.rank
        self._workers = workers
        self._num_workers = num_workers
        self._pool = state.pool
        self._lateness = lateness
        self._readiness = Readiness(num_workers)
        self._loop = loop
        self._worked_us = 0
        """For how long this server had worked when it began to handle frames."""
        self.tracer = tracer
        self._stopped = False
        rows = self.rows = RowsConsumer(self)
        self._handlers = {
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.ENDED: self._end,
            Kind.PUSH_ROWS: rows.push,
            Kind.PULL_ROWS: rows.ask,
        }
        """By kind, what handles a frame whose turn it is."""

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
        """Handle the most urgent frame, and more if they are tiny or too many wait; return whether
        any is left. The loop calls it between two looks at the connections."""
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
                self._handlers[header.kind](received)
            except ProtocolError as error:
                workers.lose(received.connection, str(error))
            except NotFinite as error:
                self._not_finite(error)
            except Exception as error:
                if received.record is None:
                    raise
                self._optimizer_failed(received.record.name, header.round, error)
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
            self._workers.fail(str(error), error.round, "NotFiniteError")
        else:
            self._workers.suspect(error.rank, str(error), ADVICE, error="NotFiniteError")

    def _optimizer_failed(self, name: str, round_: int, error: Exception) -> None:
        _log.exception("the optimizer failed")
        self.stop()
        self._workers.fail(f"the optimizer failed on {name}: {in_one_line(error)}", round_)

    # What holds for a whole store, or the whole job.

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Install a store's optimizer, and end the rounds that have waited for it."""
        for record in self.engine.set_optimizer(store, optimizer):
            self.end_rounds(record)

    def end_pushes(self, step: int, elems: int) -> None:
        """Takes note of how many elements worker rank 0 has pushed here in a clipped step."""
        self.carry_out(self.engine.end_pushes(step, elems))

    def scaled(self, step: int, scale: float, is_dropped: bool) -> None:
        """End the rounds of a clipped step, by urgency: rank 0 has scaled or dropped its sums."""
        for held in self.engine.state.clipped.scaled(step, scale, is_dropped):
            self._queue_end(0, held)

    def worker_left(self, rank: int) -> None:
        """Note a worker that has left, if all its frames are handled: rounds go on without it where
        they may, and else the job ends if one waits for it."""
        state = self.engine.state
        if state.workers_may_leave and self._workers.departed(rank):
            for waiting in self.engine.leave(rank):
                self._queue_end(rank, waiting)
        if self._workers.departed(rank):
            state.gone.add(rank)
            for record in self.checkpoints.worker_left():
                self.end_rounds(record)
        self.carry_out(self.engine.blame())

    def let_workers_leave(self) -> None:
        """Has rounds go on without workers that leave, whatever the settings say."""
        self.engine.state.workers_may_leave = True
        for rank in range(self._num_workers):
            if self._workers.departed(rank):
                self.worker_left(rank)

    def _queue_end(self, rank: int, waiting: Round[Any]) -> None:
        """Queues what ends a complete round, as if a worker's push had come."""
        record = waiting.record
        header = PushHeader(
            Kind.ENDED, rank, payload_bytes=record.size_elems * record.plan.dtype.itemsize,
            key=record.plan.key_id, round=waiting.number, step=waiting.step,
            priority=waiting.priority,
        )  # fmt: skip
        self.add(Received(self._workers.connections[rank], header, record))

    def _end(self, received: Received) -> None:
        assert received.record is not None
        self.end_rounds(received.record)

    # Slices that workers push.

    def land_push(self, connection: Connection, header: PushHeader) -> Landing:
        """Lands a slice in a buffer; ProtocolError for a push that can't be right."""
        key = self.engine.key_of_slices(header.key, header.rank)
        slice_, flags = key.slice_at(header.round, header.slice, header.rank), header.flags
        received = Received(connection, header, slice_, None, size_bytes=header.payload_bytes)
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
        header, slice_, gradient = received.header, received.record, received.payload
        assert isinstance(slice_, ServerSlice)
        start_ns = now_ns() if self.tracer.enabled else 0
        may_end = slice_.push(header, gradient, received.ready_s)
        if start_ns and gradient is not None:
            self.trace_sum(header, start_ns)
        if may_end or self._workers.done:  # most pushes are not the last one of a round
            self.end_rounds(slice_)

    def trace_sum(self, header: Any, start_ns: int) -> None:
        """Records that a worker's frame has been added to its round since `start_ns`."""
        self.tracer.span(span(SUM, header, start_ns, start_ns, header.rank, header.payload_bytes))

    # Values that workers ask for.

    def take_pull(self, connection: Connection, header: PullHeader, _: None) -> None:
        """Queues a request for a key's value."""
        self.add(Received(connection, header))

    def _pull(self, received: Received) -> None:
        header = received.header
        key = self.engine.key_of_slices(header.key, header.rank)
        self.carry_out(self.engine.pull(key, header))

    def _answer_pull(self, pull: Pull) -> None:
        """Answers a pull with a value, which is new enough."""
        header, slice_ = pull.request, pull.record
        connection = self._workers.connections[header.rank]
        if not self._workers.listens(connection):
            return
        if not isinstance(slice_, ServerSlice):
            self.rows.answer(connection, pull)
            return
        # The worker finds where the slice belongs by a round of the slice's generation.
        round_ = slice_.rounds.value_round(header.round)
        buffer, payload, encoded = slice_.wire(header.rank, False, bool(header.flags & EXACT))
        answer = PulledHeader(
            Kind.PULLED, self._rank, encoded, key=slice_.plan.key_id, slice=slice_.index,
            round=round_, request=header.request, priority=header.priority,
            worked_us=self._worked_us,
            late_us=slice_.late_us(round_).get(header.rank, 0),
        )  # fmt: skip
        urgent = urgency(header.step, header.priority)
        self._send_value(header.rank, urgent, answer, buffer, payload)

    # Rounds that end.

    def end_rounds(self, record: Record[Any]) -> None:
        """Ends the complete rounds of a record, after what may have made them complete."""
        self.carry_out(self.engine.end_rounds(record))
        if self.states.waiting:
            self.states.round_ended(self.engine.keys[record.plan.key_id])

    def carry_out(self, commands: Iterator[Command]) -> bool:
        """Does what the engine says, one command after the other; returns whether rounds have
        ended."""
        traces, has_ended = self.tracer.enabled, False
        start_ns = now_ns() if traces else 0
        for command in commands:
            if isinstance(command, Round):
                has_ended = True
                if traces:
                    self._trace_update(command, start_ns)
                    start_ns = now_ns()
                if self.checkpoints.waits_for_rounds:
                    self.checkpoints.record_ended(command.record)
                self._lateness.note(command)
                if command.answered:
                    self._answer(command)
            elif isinstance(command, Pull):
                self._answer_pull(command)
            elif isinstance(command, Answer):
                self._answer(command.round)
            elif isinstance(command, SendSquares):
                words = memoryview(encode(Squares(command.squares, command.share)))
                header = StepHeader(Kind.SQUARES, self._rank, step=command.step)
                self._workers.tell_rank_0(header, words)
            elif isinstance(command, SendVotes):
                vote = NormHeader(Kind.VOTE, self._rank, store=command.store, number=command.number)
                self._workers.tell_rank_0(vote, memoryview(encode(Vote(command.drops))))
            elif isinstance(command, Blame):
                self._workers.suspect(*command)
        return has_ended

    def _answer(self, ended: Round[Any]) -> None:
        """Queues a round's value to the workers that want it."""
        record = ended.record
        if ended.wanting and isinstance(record, ServerSlice):
            self._send_result(record, ended)
        if ended.others and self.engine.keys[record.plan.key_id].all_ended(ended):
            self._tell_ended(ended)

    def _send_result(self, slice_: ServerSlice, ended: Round[Any]) -> None:
        """Queue a slice's value to the workers that want it; to those that have it, or of an empty
        sum, only that it has not changed."""
        flags = 0
        have_it: Collection[int] = ()
        if not ended.changed:
            flags = NO_GRADIENT
            if slice_.plan.optimizer is None:
                have_it = ended.wanting
            elif slice_.travels_as_it_is:
                have_it = ended.have_value
        urgent = urgency(ended.step, ended.priority)
        each, all_late_us = slice_.plan.codecs.values.of_each_worker, slice_.late_us(ended.number)
        wired, wired_since_last = None, False
        for rank in ended.wanting:
            connection = self._workers.connections[rank]
            if connection.closed or rank in self._workers.done:
                continue
            buffer, payload, encoded, worked_us, late_us = None, None, 0, 0, 0
            if rank not in have_it:
                has_last = rank in ended.have_last
                if wired is None or each or has_last != wired_since_last:
                    wired = slice_.wire(rank, True, ended.exact, has_last)
                    wired_since_last = has_last
                buffer, payload, encoded = wired
                worked_us, late_us = self._worked_us, all_late_us.get(rank, 0)
            header = UpdatedHeader(
                Kind.UPDATED, self._rank, flags | encoded, key=slice_.plan.key_id,
                slice=slice_.index, round=ended.number, step=ended.step, priority=ended.priority,
                behind=ended.behind, worked_us=worked_us, late_us=late_us,
            )  # fmt: skip
            if buffer is None or payload is None:
                connection.writer.push(Frame(urgent, header))
            else:
                self._send_value(rank, urgent, header, buffer, payload)

    def _send_value(
        self, rank: int, urgent: int, header: SliceValueHeader, buffer: Buffer, payload: Payload
    ) -> None:
        """Queues a value as it travels, which the buffer has."""
        if isinstance(payload, memoryview):
            frame = _Value(urgent, header, payload)
        else:
            frame = late = _LateValue(urgent, header)
            late.late = payload
        frame.buffer = buffer
        buffer.sends += 1
        queued = traced(self.tracer, frame, rank) if self.tracer.enabled else frame
        self._workers.connections[rank].writer.push(queued)

    def _tell_ended(self, ended: Round[Any]) -> None:
        """Tells workers that a round has ended, where no result does: their windows move on."""
        header = EndedHeader(
            Kind.ENDED, self._rank, 0 if ended.changed else NO_GRADIENT,
            key=ended.record.plan.key_id, round=ended.number, step=ended.step,
        )  # fmt: skip
        for rank in ended.others:
            connection = self._workers.connections[rank]
            if self._workers.listens(connection):
                connection.writer.push(Frame(URGENT, header))

    def _trace_update(self, ended: Round[Any], start_ns: int) -> None:
        """Records that a slice's round has been ended since `start_ns`."""
        slice_ = ended.record
        if isinstance(slice_, ServerSlice):
            self.tracer.span(
                Span(
                    UPDATE, slice_.plan.key_id, start_ns, start_ns, now_ns(), UNKNOWN,
                    ended.number, ended.step, slice_.index, ended.priority, slice_.size_bytes,
                )
            )  # fmt: skip


class RowsConsumer:
    """Workers' pushes and pulls of keys of rows. Belongs to the server's thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._engine = consumer.engine
        self._tracer = consumer.tracer

    def land_push(self, connection: Connection, header: PushRowsHeader) -> Landing:
        """Lands rows; ProtocolError for a push that can't be right."""
        key = self._engine.key_of_rows(header.key, header.rank).rows
        carries = bool(header.flags & CARRIES)
        if carries != (header.workers > 0):
            raise ProtocolError(f"it sent {key.name} with the sum of {header.workers} workers")
        if carries:
            key.rounds.check_ahead(header.rank, header.round)
        else:
            key.check_push(header.rank, header.round)
        if header.flags & NO_GRADIENT or (header.flags & IN_HOST_SUM and not carries):
            if header.payload_bytes or header.frames != 1 or header.round == INITIAL_ROUND:
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes in {header.frames} frames for "
                    f"{key.name} without a gradient in round {header.round}"
                )
            return None, Received(connection, header, key)
        plan = key.plan
        dtype = plan.sum_dtype if carries else plan.dtype
        most_bytes = -1
        if header.flags & ENCODED:
            codec, dtype = plan.codecs.gradients, plan.dtype
            travels = header.round > INITIAL_ROUND and not codec.in_place
            most_bytes = codec.most_bytes(header.rows * key.row_elems) if travels else 0
        check_frame(header, key.rows, key.row_elems * dtype.itemsize, most_bytes)
        size_bytes = header.payload_bytes
        payload = memory(size_bytes)
        frame = RowsFrame(payload, dtype)
        received = Received(connection, header, key, frame, size_bytes)
        if self._tracer.enabled:
            received.since_ns = now_ns()
        return payload, received

    def take_push(self, connection: Connection, header: PushRowsHeader, received: Received) -> None:
        """Queues rows that have arrived."""
        trace_arrival(self._tracer, header, received.since_ns)
        self._consumer.add_push(received)

    def land_pull(self, connection: Connection, header: PullRowsHeader) -> Landing:
        """Lands a request for rows; ProtocolError for one that can't be right."""
        key = self._engine.key_of_rows(header.key, header.rank).rows
        count, rest = divmod(header.payload_bytes, NUMBER.itemsize)
        each = 2 if header.flags & header.KNOWN else 1
        most = each * key.rows if header.flags & header.NAMED else 1
        if rest or count > most or (count % each and header.flags & header.NAMED):
            raise ProtocolError(
                f"it sent {header.payload_bytes} bytes to ask for rows of {key.name}, of which "
                f"this server keeps {key.rows}"
            )
        payload = memory(header.payload_bytes)
        return payload, payload

    def take_pull(
        self, connection: Connection, header: PullRowsHeader, payload: memoryview
    ) -> None:
        """Queues a request for rows; ProtocolError for one that can't be right."""
        key = self._engine.key_of_rows(header.key, header.rank).rows
        words = np.frombuffer(payload, NUMBER) if payload else np.empty(0, NUMBER)
        if header.flags & header.NAMED:
            named = len(words) // 2 if header.flags & header.KNOWN else len(words)
            check_numbers(words[:named], 0, key.rows)
        size_bytes = header.payload_bytes
        self._consumer.add_push(Received(connection, header, key, words, size_bytes))

    def push(self, received: Received) -> None:
        """Handles rows whose turn it is."""
        header, rows = received.header, received.record
        assert isinstance(rows, ServerRows)
        start_ns = now_ns()
        rows.push(header, received.payload)
        if self._tracer.enabled and (header.workers or not header.flags & IN_HOST_SUM):
            self._consumer.trace_sum(header, start_ns)
        self._consumer.end_rounds(rows)
        if not self._consumer.queue.heap:
            rows.update_in_advance()

    def ask(self, received: Received) -> None:
        """Handle a request whose turn it is, by its payload: the rows that it names, perhaps with
        the rounds that it knows, or the round since which rows have changed."""
        header = received.header
        key = self._engine.key(header.key, header.rank)
        self._consumer.carry_out(self._engine.pull(key, header, received.payload))

    def answer(self, connection: Connection, pull: Pull) -> None:
        """Answers a request for rows, whose values are new enough."""
        request, key, words = pull.request, pull.record, pull.words
        assert isinstance(request, PullRowsHeader) and isinstance(key, ServerRows)
        assert words is not None
        exact = bool(request.flags & EXACT)
        if request.flags & request.NAMED:
            if request.flags & request.KNOWN:
                words = key.changed_of(*np.split(words, 2))
            all_come = not request.flags & request.KNOWN
            answer = key.wire(words, request.priority, exact, named=all_come)
        else:
            since = int(words[0]) if len(words) else INITIAL_ROUND - 1
            answer = key.wire_since(since, request.priority, exact)
        urgent = urgency(request.step, request.priority)
        for rows in answer:
            header = RowsHeader(
                Kind.ROWS, self._engine.state.rank, flags=rows.flags, key=request.key,
                round=key.round, priority=request.priority, request=request.request,
                frames=len(answer), first=rows.packed.first, rows=rows.packed.rows,
            )  # fmt: skip
            rows.begin_send()
            frame = _RowsFrame(urgent, header)
            frame.rows = rows
            connection.writer.push(traced(self._tracer, frame, request.rank))
