"""Takes what workers send of keys of rows, and answers them."""

from __future__ import annotations

import time
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from p3kv.codecs import part_of_rows
from p3kv.common.trace import Tracer, now_ns
from p3kv.errors import ProtocolError
from p3kv.server.engine import RowsKey, Unit
from p3kv.server.spans import trace_sum
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import KeyHeader, PullRowsHeader, PushRowsHeader, QueuedHeader, RowsHeader
from p3kv.wire.framing import Frame, Landing
from p3kv.wire.header import ENCODED, EXACT, INITIAL_ROUND, NO_GRADIENT, Kind
from p3kv.wire.queue import urgency
from p3kv.wire.rows import (
    NUMBER,
    Rows,
    check_encoded_size,
    check_numbers,
    check_size,
    decoded,
    pieces,
    unpacked,
)
from p3kv.wire.slice_sizes import SliceSizesByRound
from p3kv.wire.spans import trace_departure, traced_arrival

Enqueue = Callable[[Connection, QueuedHeader, Callable[[], None], Unit], None]
"""Has the consumer call a function when a frame's turn comes."""


class _SharedFrame:
    """Some rows of a value for one worker or several, copied when the first of them gets it, and
    encoded where the key has a codec for values, unless they are to be exact. Initial values travel
    as they are."""

    def __init__(self, key: RowsKey, numbers: np.ndarray, exact: bool) -> None:
        self._key = key
        self._numbers = numbers
        encodes = key.round > INITIAL_ROUND and not key.plan.codecs.values.in_place
        self._encodes = encodes and not exact
        self.flags = ENCODED if self._encodes else 0
        self._copy: Optional[memoryview] = None
        self.waiting = 0
        """By how many workers."""

    def queued(self, urgent: int, header: RowsHeader) -> Frame:
        """Frame that brings the rows to one worker."""
        self.waiting += 1
        return Frame(urgent, header, self._payload, self._sent)

    def copy_if_needed(self) -> None:
        """To be called before the value changes."""
        if self.waiting:
            self._payload()

    def _payload(self) -> memoryview:
        if self._copy is None:
            rows = Rows(self._numbers, self._key.value[self._numbers])
            self._copy = self._encoded(rows) if self._encodes else rows.copied()
        return self._copy

    def _encoded(self, rows: Rows) -> memoryview:
        plan, part = self._key.plan, part_of_rows(self._key.round)
        return rows.encoded(
            plan.codecs.values.most_bytes(rows.elements.size),
            lambda elements, out: plan.encoder().encode(elements, part, out),
        )

    def _sent(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self._copy = None


class _Pull(NamedTuple):
    """A worker's request for rows, and since when it waits, on the monotonic clock."""

    connection: Connection
    request: PullRowsHeader
    words: np.ndarray
    """The rows that it names, or the round since which it wants the rows that have changed."""
    since_s: float


class _Values:
    """A key with the pulls that wait for its value, and the answers that have it."""

    def __init__(self, key: RowsKey) -> None:
        self.key = key
        self.waiting: List[_Pull] = []
        self.shared: Dict[Tuple[int, bool], List[_SharedFrame]] = {}
        """By the round since which rows have changed, and whether they are exact. Workers ask for
        the same."""
        self.frames: List[_SharedFrame] = []
        """All that may not have left."""

    def value_changes(self) -> None:
        """To be called before."""
        for frame in self.frames:
            frame.copy_if_needed()
        self.frames = []
        self.shared = {}


class RowsConsumer:
    """Workers' pushes and pulls of keys of rows. Belongs to the server's thread."""

    def __init__(
        self,
        rank: Callable[[], int],
        workers: Workers,
        key: Callable[[KeyHeader], RowsKey],
        sizes: SliceSizesByRound,
        enqueue: Enqueue,
        settle: Callable[[Unit], None],
        asked: Callable[[], None],
        tracer: Callable[[], Tracer],
    ) -> None:
        """`rank()` and `tracer()` are this server's; `key(header)` is the key of which a frame
        speaks. `settle(key)` ends the rounds that are complete; `asked()` is called when a request
        has been answered, or waits."""
        self._rank = rank
        self._workers = workers
        self._key = key
        self._sizes = sizes
        self._enqueue = enqueue
        self._settle = settle
        self._asked = asked
        self._tracer = tracer
        self._values: Dict[int, _Values] = {}

    def serve(self, key: RowsKey) -> None:
        """Answers requests for a key's rows from now on."""
        if key.plan.key_id not in self._values:
            values = self._values[key.plan.key_id] = _Values(key)
            key.before_change = values.value_changes

    def land_push(self, connection: Connection, header: PushRowsHeader) -> Landing:
        """Where rows are received; ProtocolError for a push that can't be right."""
        key = self._key(header)
        key.check_push(header.rank, header.round)
        if header.flags & NO_GRADIENT:
            if header.payload_bytes or header.frames != 1 or header.round == INITIAL_ROUND:
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes in {header.frames} frames for "
                    f"{key.name} without a gradient in round {header.round}"
                )
            act = partial(self._push, header, key, lambda: None)
            return Landing(None, partial(self._enqueue, connection, header, act, key))
        plan = key.plan
        payload = memoryview(bytearray(header.payload_bytes))
        unpack: Callable[[], Rows] = partial(unpacked, payload, plan.dtype, key.row_elems)
        if header.flags & ENCODED:
            codec, part = plan.codecs.gradients, part_of_rows(header.round)
            travels = header.round > INITIAL_ROUND and not codec.in_place
            most_bytes = codec.most_bytes(plan.kept_elems) if travels else 0
            check_encoded_size(header.payload_bytes, most_bytes, key.rows)
            unpack = partial(
                decoded, payload, plan.dtype, key.row_elems, key.rows,
                lambda encoded, out: plan.decoder.decode(encoded, part, out),
            )  # fmt: skip
        else:
            check_size(header.payload_bytes, key.row_bytes, key.rows)
        act = partial(self._push, header, key, unpack)
        arrived = partial(self._enqueue, connection, header, act, key)
        landed = traced_arrival(self._tracer(), header, arrived)
        return Landing(payload if header.payload_bytes else None, landed)

    def land_pull(self, connection: Connection, header: PullRowsHeader) -> Landing:
        """Takes a request for rows; ProtocolError for one that can't be right."""
        key = self._key(header)
        count, rest = divmod(header.payload_bytes, NUMBER.itemsize)
        if rest or count > (key.rows if header.flags & header.NAMED else 1):
            raise ProtocolError(
                f"it sent {header.payload_bytes} bytes to ask for rows of {key.name}, of which "
                f"this server keeps {key.rows}"
            )
        payload = memoryview(bytearray(header.payload_bytes))

        def arrived() -> None:
            words = np.frombuffer(payload, NUMBER) if count else np.empty(0, NUMBER)
            if header.flags & header.NAMED:
                check_numbers(words, 0, key.rows)
            pull = _Pull(connection, header, words, time.monotonic())
            self._enqueue(connection, header, partial(self._ask, key, pull), key)

        return Landing(payload if count else None, arrived)

    def answer_pulls(self, key: RowsKey) -> None:
        """Answers the pulls that wait for a key's value and for which it is new enough now."""
        values = self._values[key.plan.key_id]
        waiting, values.waiting = values.waiting, []
        for pull in waiting:
            self._pull(key, pull)

    def _push(
        self, header: PushRowsHeader, key: RowsKey, rows: Callable[[], Optional[Rows]]
    ) -> None:
        start_ns = now_ns()
        key.push(header.rank, header.round, header.frames, rows(), header.step)
        trace_sum(self._tracer(), header, start_ns)
        self._settle(key)

    def _ask(self, key: RowsKey, pull: _Pull) -> None:
        key.check_ahead(pull.request.round, pull.request.rank)
        self._pull(key, pull)
        self._asked()

    def _pull(self, key: RowsKey, pull: _Pull) -> None:
        """Answers a pull as soon as the value is new enough."""
        if not key.ledger.is_new_enough(pull.request.rank, pull.request.round):
            self._values[pull.request.key].waiting.append(pull)
        elif self._workers.listens(pull.connection):
            self._answer(key, pull)

    def _answer(self, key: RowsKey, pull: _Pull) -> None:
        request = pull.request
        frames = self._frames(key, pull)
        urgent = urgency(request.step, request.priority)
        header = RowsHeader(
            Kind.ROWS, self._rank(), flags=frames[0].flags, key=request.key, round=key.round,
            priority=request.priority, request=request.request, frames=len(frames),
        )  # fmt: skip
        for shared in frames:
            frame = shared.queued(urgent, header)
            trace_departure(self._tracer(), frame, request.rank)
            pull.connection.writer.push(frame)

    def _frames(self, key: RowsKey, pull: _Pull) -> List[_SharedFrame]:
        values = self._values[pull.request.key]
        exact = bool(pull.request.flags & EXACT)
        if pull.request.flags & PullRowsHeader.NAMED:
            return self._cut(values, pull.words, exact)
        since = int(pull.words[0]) if len(pull.words) else INITIAL_ROUND - 1
        frames = values.shared.get((since, exact))
        if frames is None:
            numbers = key.changed_since(since)
            frames = values.shared[since, exact] = self._cut(values, numbers, exact)
        return frames

    def _cut(self, values: _Values, numbers: np.ndarray, exact: bool) -> List[_SharedFrame]:
        key = values.key
        slice_size = self._sizes.of(
            self._sizes.generation(max(key.round, INITIAL_ROUND))
        ).slice_size
        most = key.most_rows(slice_size)
        frames = [_SharedFrame(key, numbers[piece], exact) for piece in pieces(len(numbers), most)]
        values.frames = [frame for frame in values.frames if frame.waiting] + frames
        return frames

    def waits_for_initial(self, key: RowsKey) -> List[_Pull]:
        """The pulls of a key that wait while it has no value at all."""
        return self._values[key.plan.key_id].waiting if key.round < INITIAL_ROUND else []
