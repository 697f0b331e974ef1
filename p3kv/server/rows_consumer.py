"""Takes what workers send of keys of rows, and answers them."""

from __future__ import annotations

from functools import partial
from typing import Optional

import numpy as np

from p3kv.codecs import part_of_rows
from p3kv.common.tracing import Tracer, now_ns
from p3kv.errors import ProtocolError
from p3kv.server.engine import Engine, RowsKey
from p3kv.server.received_frames import ReceivedFrames
from p3kv.server.round_ends import RoundEnds
from p3kv.server.spans import trace_sum
from p3kv.server.waiting import Waiting
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import PullRowsHeader, PushRowsHeader, RowsHeader
from p3kv.wire.framing import Frame, Landing
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    EXACT,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    Kind,
)
from p3kv.wire.queue import urgency
from p3kv.wire.rows import (
    NUMBER,
    check_frame,
    check_numbers,
    memory,
    unpacked,
)
from p3kv.wire.spans import trace_departure, traced_arrival


class RowsConsumer:
    """Workers' pushes and pulls of keys of rows. Belongs to the server's thread."""

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        frames: ReceivedFrames,
        ends: RoundEnds,
        waiting: Waiting,
        tracer: Tracer,
    ) -> None:
        self._engine = engine
        self._workers = workers
        self._frames = frames
        self._ends = ends
        self._waiting = waiting
        self._tracer = tracer

    def land_push(self, connection: Connection, header: PushRowsHeader) -> Landing:
        """Where rows are received; ProtocolError for a push that can't be right."""
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
            act = partial(self._push, header, key, None)
            return Landing(None, partial(self._frames.push, connection, header, act, key))
        plan = key.plan
        dtype = plan.sum_dtype if carries else plan.dtype
        most_bytes = -1
        if header.flags & ENCODED:
            codec, dtype = plan.codecs.gradients, plan.dtype
            travels = header.round > INITIAL_ROUND and not codec.in_place
            most_bytes = codec.most_bytes(header.rows * key.row_elems) if travels else 0
        check_frame(header, key.rows, key.row_elems * dtype.itemsize, most_bytes)
        payload = memory(header.payload_bytes)
        act = partial(self._push, header, key, payload, dtype)
        arrived = partial(self._frames.push, connection, header, act, key)
        landed = traced_arrival(self._tracer, header, arrived)
        return Landing(payload if header.payload_bytes else None, landed)

    def land_pull(self, connection: Connection, header: PullRowsHeader) -> Landing:
        """Takes a request for rows; ProtocolError for one that can't be right."""
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

        def arrived() -> None:
            words = np.frombuffer(payload, NUMBER) if count else np.empty(0, NUMBER)
            if header.flags & header.NAMED:
                check_numbers(words[: count // each], 0, key.rows)
            act = partial(self._ask, connection, header, key, words)
            self._frames.push(connection, header, act, key)

        return Landing(payload if count else None, arrived)

    def _push(
        self,
        header: PushRowsHeader,
        key: RowsKey,
        payload: Optional[memoryview],
        dtype: Optional[np.dtype] = None,
    ) -> None:
        """Takes a frame, whose elements are of this dtype; without a payload it has no gradient."""
        start_ns, rank, round_, workers = now_ns(), header.rank, header.round, header.workers
        in_sum = header.flags & IN_HOST_SUM
        if in_sum and not (workers and key.has_begun_sum(rank, round_)):
            self._engine.push_in_host_sum(key, rank, round_, False, header.step)
        if workers or not in_sum:
            rows = None
            if payload is not None and dtype is not None:
                decoder, part = key.plan.decoder, part_of_rows(round_)
                rows = unpacked(header, payload, dtype, key.row_elems, decoder, part)
            key.push(rank, round_, header.frames, rows, header.step, workers)
            trace_sum(self._tracer, header, start_ns)
        self._ends.settle(key)
        if not self._frames.queue.heap:
            key.update_in_advance()

    def _ask(
        self, connection: Connection, header: PullRowsHeader, key: RowsKey, words: np.ndarray
    ) -> None:
        """`words`: the rows that the worker names, perhaps with the rounds that it knows, or the
        round since which it wants the rows that have changed."""
        key.check_ahead(header.round, header.rank)
        self._waiting.pull(key, header, partial(self._answer, connection, header, key, words))
        self._waiting.check_initial_values()

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
            frame = Frame(urgent, header, rows.payload, rows.end_send)
            trace_departure(self._tracer, frame, request.rank)
            connection.writer.push(frame)
