"""Takes what workers send of keys of rows, and answers them."""

from __future__ import annotations

import numpy as np

from p3kv.common.tracing import now_ns
from p3kv.errors import ProtocolError
from p3kv.server.consumer import Consumer, Received
from p3kv.server.engine import Pull, RowsFrame, SentRows, ServerRows
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import PullRowsHeader, PushRowsHeader, RowsHeader
from p3kv.wire.framing import Frame, urgency
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    EXACT,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    Kind,
)
from p3kv.wire.rows import (
    NUMBER,
    check_frame,
    check_numbers,
    memory,
)
from p3kv.wire.spans import trace_arrival, traced


class _RowsFrame(Frame):
    """Rows of a value, which are copied when the first frame that has them begins to leave."""

    __slots__ = ("rows",)
    rows: SentRows

    def begin(self) -> memoryview:
        return self.rows.payload()

    def sent(self) -> None:
        self.rows.end_send()


class RowsConsumer:
    """Workers' pushes and pulls of keys of rows. Belongs to the server's thread."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        consumer.rows = self
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
            return None, Received(self._push, connection, header, key)
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
        received = Received(self._push, connection, header, key, frame, size_bytes)
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
        self._consumer.add_push(Received(self._ask, connection, header, key, words, size_bytes))

    def _push(self, received: Received) -> None:
        header, rows = received.header, received.record
        assert isinstance(rows, ServerRows)
        start_ns = now_ns()
        rows.push(header, received.payload)
        if self._tracer.enabled and (header.workers or not header.flags & IN_HOST_SUM):
            self._consumer.trace_sum(header, start_ns)
        self._consumer.end_rounds(rows)
        if not self._consumer.queue.heap:
            rows.update_in_advance()

    def _ask(self, received: Received) -> None:
        """The payload: the rows that the worker names, perhaps with the rounds that it knows, or
        the round since which it wants the rows that have changed."""
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
