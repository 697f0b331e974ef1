"""Takes what workers send of keys of rows, and answers them."""

from __future__ import annotations

import time
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional

import numpy as np

from p3kv.consistency import Consistency
from p3kv.errors import ProtocolError
from p3kv.server.aggregation import Aggregator
from p3kv.server.rows import RowsKey
from p3kv.server.workers import Workers
from p3kv.trace import UNKNOWN, Tracer
from p3kv.wire.connection import Connection
from p3kv.wire.framing import Landing
from p3kv.wire.header import INITIAL_ROUND, NAMED, NO_GRADIENT, URGENT, Header, Kind, pack_header
from p3kv.wire.messages import DeclaredKey
from p3kv.wire.queue import urgency
from p3kv.wire.rows import NUMBER, Rows, check_numbers, check_size, pieces, unpacked
from p3kv.wire.spans import traced_arrival, traced_departure
from p3kv.wire.terms import TermsByRound

Enqueue = Callable[[Connection, Header, Callable[[], bool]], None]
"""Has the consumer call a function when a frame's turn comes; it returns whether a round ended."""


class _Frame:
    """Some rows of a value for one worker or several, copied when the first of them gets it."""

    def __init__(self, key: RowsKey, numbers: np.ndarray) -> None:
        self._key = key
        self._numbers = numbers
        self._copy: Optional[memoryview] = None
        self.waiting = 0
        """By how many workers."""

    def queue(
        self, connection: Connection, urgent: int, header: bytes, tracer: Tracer, *traced: int
    ) -> None:
        self.waiting += 1
        frame = traced_departure(tracer, self._payload, self._sent, self._key.key.key_id, *traced)
        connection.writer.push(urgent, header, *frame)

    def copy_if_needed(self) -> None:
        """To be called before the value changes."""
        if self.waiting:
            self._payload()

    def _payload(self) -> memoryview:
        if self._copy is None:
            self._copy = Rows(self._numbers, self._key.value[self._numbers]).copied()
        return self._copy

    def _sent(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self._copy = None


class _Pull(NamedTuple):
    """A worker's request for rows, and since when it waits, on the monotonic clock."""

    connection: Connection
    request: Header
    words: np.ndarray
    """The rows that it names, or the round since which it wants the rows that have changed."""
    since_s: float


class _Values:
    """A key with the pulls that wait for its value, and the answers that have it."""

    def __init__(self, key: RowsKey) -> None:
        self.key = key
        self.waiting: List[_Pull] = []
        self.shared: Dict[int, List[_Frame]] = {}
        """By the round since which rows have changed. Workers ask for the same."""
        self.frames: List[_Frame] = []
        """All that may not have left."""

    def value_changes(self) -> None:
        """To be called before."""
        for frame in self.frames:
            frame.copy_if_needed()
        self.frames = []
        self.shared = {}


class RowsTraffic:
    """The keys of rows of a server. Belongs to the server's thread."""

    def __init__(
        self,
        rank: Callable[[], int],
        workers: Workers,
        aggregator: Aggregator,
        terms: TermsByRound,
        enqueue: Enqueue,
        tracer: Callable[[], Tracer],
    ) -> None:
        """`rank()` and `tracer()` are this server's."""
        self._rank = rank
        self._workers = workers
        self._aggregator = aggregator
        self._terms = terms
        self._enqueue = enqueue
        self._tracer = tracer
        self.keys: Dict[int, RowsKey] = {}
        self.ended: Callable[[RowsKey], None] = lambda key: None
        """Called when a key has ended a round, and before it ends the next."""
        self._values: Dict[int, _Values] = {}

    def declare(self, declared: DeclaredKey, consistency: Consistency) -> None:
        """Keeps a key from now on; ProtocolError when another worker has declared it otherwise."""
        key = RowsKey(declared, self._rank(), self._aggregator, consistency)
        if self.keys.setdefault(declared.key_id, key).declared != declared:
            raise ProtocolError(f"it declares a key otherwise than another worker: {declared}")
        self._values.setdefault(declared.key_id, _Values(key))

    def land_push(self, connection: Connection, header: Header) -> Landing:
        """Where rows are received; ProtocolError for a push that can't be right."""
        key = self._key(header)
        key.check_push(header.rank, header.round)
        if header.flags & NO_GRADIENT:
            if header.payload_bytes or header.slice != 1 or header.round == INITIAL_ROUND:
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes in {header.slice} frames for "
                    f"{key.called} without a gradient in round {header.round}"
                )
            act = partial(self._push, header, key, None)
            return Landing(None, partial(self._enqueue, connection, header, act))
        check_size(header.payload_bytes, key.row_bytes, key.rows)
        payload = memoryview(bytearray(header.payload_bytes))

        def arrived() -> None:
            rows = unpacked(payload, key.dtype, key.row_elems)
            self._enqueue(connection, header, partial(self._push, header, key, rows))

        landed = traced_arrival(self._tracer(), header, arrived)
        return Landing(payload if header.payload_bytes else None, landed)

    def land_pull(self, connection: Connection, header: Header) -> Landing:
        """Takes a request for rows; ProtocolError for one that can't be right."""
        key = self._key(header)
        count, rest = divmod(header.payload_bytes, NUMBER.itemsize)
        if rest or count > (key.rows if header.flags & NAMED else 1):
            raise ProtocolError(
                f"it sent {header.payload_bytes} bytes to ask for rows of {key.called}, of which "
                f"this server keeps {key.rows}"
            )
        payload = memoryview(bytearray(header.payload_bytes))

        def arrived() -> None:
            words = np.frombuffer(payload, NUMBER) if count else np.empty(0, NUMBER)
            if header.flags & NAMED:
                check_numbers(words, 0, key.rows)
            pull = _Pull(connection, header, words, time.monotonic())
            self._enqueue(connection, header, partial(self._pull, key, pull))

        return Landing(payload if count else None, arrived)

    def _key(self, header: Header) -> RowsKey:
        key = self.keys.get(header.key)
        if key is None:
            raise ProtocolError(f"worker {header.rank} speaks of rows of key {header.key}")
        return key

    def _push(self, header: Header, key: RowsKey, rows: Optional[Rows]) -> bool:
        key.push(header.rank, header.round, header.slice, rows, header.step)
        end = key.rows_to_update()
        if end:
            self._values[header.key].value_changes()
            key.update_until(end)
        return self.end_rounds(key)

    def optimizer_is_set(self, store: int) -> None:
        """Ends the rounds that have waited for the optimizer: those that are a worker's own."""
        for key in self.keys.values():
            if key.own_rounds and key.key.store == store:
                self.end_rounds(key)

    def end_rounds(self, key: RowsKey) -> bool:
        """Ends the complete rounds of a key; whether there were any."""
        key_id = key.key.key_id
        values, ended = self._values[key_id], False
        while key.next_ends():
            values.value_changes()
            round_ = key.end_round()
            self.ended(key)
            ended = True
            told = pack_header(
                Kind.ENDED, self._rank(), key=key_id, round=round_.round, step=round_.step,
                flags=0 if round_.has_gradient else NO_GRADIENT,
            )  # fmt: skip
            for rank in round_.arrived:
                connection = self._workers.connections[rank]
                if self._workers.listens(connection):
                    connection.writer.push(URGENT, told)
            waiting, values.waiting = values.waiting, []
            for pull in waiting:
                self._pull(key, pull)
        return ended

    def _pull(self, key: RowsKey, pull: _Pull) -> bool:
        """Answers a pull as soon as the value is new enough."""
        key.check_ahead(pull.request.round, pull.request.rank)
        if not key.is_new_enough(pull.request.round, pull.request.rank):
            self._values[pull.request.key].waiting.append(pull)
        elif self._workers.listens(pull.connection):
            self._answer(key, pull)
        return False

    def _answer(self, key: RowsKey, pull: _Pull) -> None:
        request = pull.request
        frames = self._frames(key, pull)
        urgent = urgency(request.step, request.priority)
        header = pack_header(
            Kind.ROWS, self._rank(), key=request.key, slice=len(frames), round=key.round,
            step=request.slice, priority=request.priority,
        )  # fmt: skip
        for frame in frames:
            frame.queue(
                pull.connection, urgent, header, self._tracer(), request.rank, key.round, UNKNOWN,
                len(frames), request.priority,
            )  # fmt: skip

    def _frames(self, key: RowsKey, pull: _Pull) -> List[_Frame]:
        values = self._values[pull.request.key]
        if pull.request.flags & NAMED:
            return self._cut(values, pull.words)
        since = int(pull.words[0]) if len(pull.words) else INITIAL_ROUND - 1
        frames = values.shared.get(since)
        if frames is None:
            frames = values.shared[since] = self._cut(values, key.changed_since(since))
        return frames

    def _cut(self, values: _Values, numbers: np.ndarray) -> List[_Frame]:
        key = values.key
        slice_size = self._terms.of(
            self._terms.generation(max(key.round, INITIAL_ROUND))
        ).slice_size
        most = key.most_rows(slice_size)
        frames = [_Frame(key, numbers[piece]) for piece in pieces(len(numbers), most)]
        values.frames = [frame for frame in values.frames if frame.waiting] + frames
        return frames

    def waits_for_initial(self, key: RowsKey) -> List[_Pull]:
        """The pulls of a key that wait while it has no value at all."""
        return self._values[key.key.key_id].waiting if key.round < INITIAL_ROUND else []
