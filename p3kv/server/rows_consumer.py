"""Takes what workers send of keys of rows, and answers them."""

from __future__ import annotations

from functools import partial

import numpy as np

from p3kv.codecs import part_of_rows
from p3kv.common.tracing import now_ns
from p3kv.errors import ProtocolError
from p3kv.server.consumer import Consumer, Received
from p3kv.server.engine import RowsKey
from p3kv.server.engine.sent_rows import SentRows
from p3kv.server.workers import Workers
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
    unpacked,
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

    def __init__(self, consumer: Consumer, workers: Workers) -> None:
        self._consumer = consumer
        self._engine = consumer.engine
        self._workers = workers
        self._tracer = consumer.tracer

    def land_push(self, connection: Connection, header: PushRowsHeader) -> Landing:
        """Lands rows; ProtocolError for a push that can't be right."""
        key = self._engine.key_of_rows(header.key, header.rank)
        carries = bool(header.flags & CARRIES)
        if carries != (header.workers > 0):
            raise ProtocolError(f"it sent {key.name} with the sum of {header.workers} workers")
        if carries:
            key.check_ahead(header.round, header.rank)
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
        received = Received(self._push, connection, header, key, (payload, dtype), size_bytes)
        if self._tracer.enabled:
            received.since_ns = now_ns()
        return payload, received

    def take_push(self, connection: Connection, header: PushRowsHeader, received: Received) -> None:
        """Queues rows that have arrived."""
        trace_arrival(self._tracer, header, received.since_ns)
        self._consumer.add_push(received)

    def land_pull(self, connection: Connection, header: PullRowsHeader) -> Landing:
        """Lands a request for rows; ProtocolError for one that can't be right."""
        key = self._engine.key_of_rows(header.key, header.rank)
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
        key = self._engine.key_of_rows(header.key, header.rank)
        words = np.frombuffer(payload, NUMBER) if payload else np.empty(0, NUMBER)
        if header.flags & header.NAMED:
            named = len(words) // 2 if header.flags & header.KNOWN else len(words)
            check_numbers(words[:named], 0, key.rows)
        size_bytes = header.payload_bytes
        self._consumer.add_push(Received(self._ask, connection, header, key, words, size_bytes))

    def _push(self, received: Received) -> None:
        """Takes a frame, with a payload and the dtype of its elements if it has a gradient."""
        header, key = received.header, received.unit
        assert isinstance(key, RowsKey)
        start_ns, rank, round_, workers = now_ns(), header.rank, header.round, header.workers
        in_sum = header.flags & IN_HOST_SUM
        if in_sum and not (workers and key.has_begun_sum(rank, round_)):
            self._engine.push_in_host_sum(key, rank, round_, False, header.step)
        if workers or not in_sum:
            rows = None
            if received.payload is not None:
                payload, dtype = received.payload
                decoder, part = key.plan.decoder, part_of_rows(round_)
                rows = unpacked(header, payload, dtype, key.row_elems, decoder, part)
            key.push(rank, round_, header.frames, rows, header.step, workers)
            if self._tracer.enabled:
                self._consumer.trace_sum(header, start_ns)
        self._consumer.settle(key)
        if not self._consumer.queue.heap:
            key.update_in_advance()

    def _ask(self, received: Received) -> None:
        """The payload: the rows that the worker names, perhaps with the rounds that it knows, or
        the round since which it wants the rows that have changed."""
        header, key, words = received.header, received.unit, received.payload
        assert isinstance(key, RowsKey)
        key.check_ahead(header.round, header.rank)
        answer = partial(self._answer, received.connection, header, key, words)
        self._consumer.waiting.pull(key, header, answer)
        self._consumer.waiting.check_initial_values()

    def _answer(
        self, connection: Connection, request: PullRowsHeader, key: RowsKey, words: np.ndarray
    ) -> None:
        if not self._workers.listens(connection):
            return
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
                Kind.ROWS, self._engine.rules.rank, flags=rows.flags, key=request.key,
                round=key.round, priority=request.priority, request=request.request,
                frames=len(answer), first=rows.packed.first, rows=rows.packed.rows,
            )  # fmt: skip
            rows.begin_send()
            frame = _RowsFrame(urgent, header)
            frame.rows = rows
            connection.writer.push(traced(self._tracer, frame, request.rank))
