"""Sends touched rows to the servers and receives rows of the value, in the worker's thread."""

from __future__ import annotations

from itertools import accumulate
from typing import (
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np

from p3kv.checkpoints import StoredRows
from p3kv.codecs import part_of_rows
from p3kv.common.tracing import Tracer, now_ns
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import PullRowsHeader, PushRowsHeader, RowsHeader
from p3kv.wire.framing import Frame, Pieces, size_of
from p3kv.wire.header import ACKNOWLEDGE, ENCODED, EXACT, GAPS, INITIAL_ROUND, NO_GRADIENT, Kind
from p3kv.wire.messages import UNKNOWN
from p3kv.wire.rows import (
    NUMBER,
    Packed,
    Rows,
    check_frame,
    check_numbers,
    index_of,
    memory,
    packed,
    pieces,
    summed,
    union,
    unpacked,
)
from p3kv.wire.slice_sizes import SliceSizesByRound
from p3kv.wire.tracing import trace_arrival, traced
from p3kv.worker.egress import Egress
from p3kv.worker.exchange import Exchange
from p3kv.worker.transfers import Done, Pull, Push, SummedRoute, Transfer, WorkerKey

OnRows = Callable[[np.ndarray], None]
"""Is told the numbers of rows that have arrived, which ascend."""
_NONE = packed(np.empty(0, NUMBER))
_NO_ROWS: Tuple[np.ndarray, np.ndarray] = np.empty(0, np.int64), np.empty((0, 0))


class Run(NamedTuple):
    """Consecutive rows that a server keeps."""

    server: int
    first: int
    """Its first row."""
    rows: int


def runs_of(key: WorkerKey) -> Iterator[Run]:
    """What each server keeps of a key of rows."""
    rows = [length // key.row_elems for _, length in key.runs]
    for (server, _), first, count in zip(key.runs, accumulate(rows, initial=0), rows):
        yield Run(server, first, count)


class RowsPush(Push):
    """The rows of a key that a worker has touched, on their way to the servers."""

    def __init__(
        self,
        key: WorkerKey,
        round: int,
        step: int,
        rows: Optional[Tuple[np.ndarray, Union[np.ndarray, StoredRows]]],
        done: Done,
    ) -> None:
        """`rows` are numbers, which ascend, and elements by row; they stay until `done`. A worker
        without a gradient has none."""
        super().__init__(key, round, step, None, None, done)
        self.has_gradient = rows is not None
        self.numbers, self.elements = rows or _NO_ROWS
        self.size_bytes = self.elements.nbytes
        self.missing_frames = 0
        """Frames that need its rows."""
        self.handed_in: Dict[int, int] = {}
        """By run that a neighbour sends, how many of its rows that has got."""


class RowsPull(Pull):
    """Rows of a key's value on their way to this worker. They are those that `named` has, or those
    that have changed since a round of each server."""

    named: Optional[np.ndarray] = None
    """Numbers of the rows that are wanted, which ascend."""
    known: Optional[np.ndarray] = None
    """For each row 1 more than the round that the worker has, so that the row comes only if it has
    changed since; else 0."""
    on_rows: Optional[OnRows] = None
    """Told of rows that are where they go."""
    request = UNKNOWN
    """The number that answers have, once it is under way."""

    def __init__(
        self, key: WorkerKey, round: int, step: int, number: int, elements: np.ndarray, done: Done
    ) -> None:
        """`elements`: where rows go, by row, contiguous and of the key's dtype; all of the tensor,
        or those that are named. They stay until `done`."""
        super().__init__(key, round, step, number, None, done)
        self.elements = elements
        self.rounds: Dict[int, int] = {}
        """By server, the round whose value the worker has; without one, all rows are to come. When
        the pull is done, the round whose value has arrived."""
        self.arriving: Dict[int, Answer] = {}
        """By server, what is still to come."""

    def landing_memory(self, answer: Answer, header: RowsHeader) -> Optional[memoryview]:
        """Where the rows of a server's frame go if they follow each other there."""
        if header.flags & (ENCODED | GAPS) or not header.rows or self.known is not None:
            return None
        first = answer.run.first if answer.words is None else answer.place
        some = self.elements[first + header.first : first + header.first + header.rows]
        return some.reshape(-1).view(np.uint8).data

    def received(self, header: RowsHeader, run: Run, rows: Rows, landed: bool) -> None:
        """Takes a frame's rows of a run; `landed`: they are where they go."""
        if not len(rows.numbers):
            return
        numbers = rows.numbers.astype(np.int64) + run.first
        if not landed:
            places = numbers
            if self.named is not None:
                places = self.named.searchsorted(numbers)
                if not np.array_equal(self.named[np.minimum(places, len(self.named) - 1)], numbers):
                    raise ProtocolError(f"it sent rows of {self.key.called} that nobody asked for")
            self.elements[index_of(places)] = rows.elements
        if self.on_rows is not None:
            self.on_rows(numbers)


class Answer:
    """A server's answer that has arrived in part."""

    def __init__(self, run: Run, words: Optional[np.ndarray], place: int) -> None:
        self.run = run
        self.words = words
        """The rows that were named; None: those that have changed."""
        self.place = place
        """Where they begin among all that the pull names."""
        self.lacks = 0 if words is None else len(words)
        """How many rows were named that have not come."""
        self.carrier: Optional[int] = None
        """The neighbour that has asked for it, if one has."""
        self.missing: Optional[int] = None
        """Frames, once the first has come."""
        self.next_row = 0


class _RowsFrame(Frame):
    """Rows of a push. What is encoded when it begins to leave has memory of its own; else the
    gradient itself is sent, and stays as it is until it has arrived."""

    __slots__ = ("encodes", "packed", "route", "rows", "transfer")
    encodes: bool
    packed: Packed
    route: RowsRoute
    rows: slice
    transfer: RowsPush

    def begin(self) -> Pieces:
        transfer, rows = self.transfer, self.rows
        some = Rows(transfer.numbers[rows], transfer.elements[rows])
        return self.route.made(transfer, some, self.encodes, self.packed)

    def sent(self) -> None:
        if self.encodes:
            self.route.needed_no_more(self.transfer)

    def arrived(self) -> None:
        if not self.encodes:
            self.route.needed_no_more(self.transfer)


class _SumOfRows(Frame):
    """Some rows of the sum of a host's gradients, made when they begin to leave."""

    __slots__ = (
        "encodes", "is_needed", "numbers", "packed", "parts", "piece", "route", "transfer",
    )  # fmt: skip
    encodes: bool
    is_needed: bool
    """Whether the transfer waits until the sum is made."""
    numbers: np.ndarray
    packed: Packed
    parts: Sequence[Rows]
    piece: Slice
    route: RowsRoute
    transfer: Push

    def begin(self) -> Pieces:
        total = summed(self.numbers, self.parts, self.transfer.key.sum_dtype)
        if len(self.parts) == 1 and not self.encodes:  # the sum may be a view of it
            total = Rows(total.numbers, total.elements.copy())
        payload = self.route.made(self.transfer, total, self.encodes, self.packed)
        if self.is_needed:
            self.route.sum_made(self.transfer, self.piece)
        return payload


class _Landed(NamedTuple):
    """Rows of an answer that arrive."""

    transfer: RowsPull
    answer: Answer
    payload: memoryview
    in_place: bool
    """Whether they are received where they go."""
    since_ns: int
    """When the header came, of rows that are traced."""


class RowsRoute(SummedRoute):
    """Sends and receives the rows of this worker's transfers. Belongs to the worker's thread."""

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        egress: Egress,
        exchange: Exchange,
        sizes: SliceSizesByRound,
        tracer: Tracer,
    ) -> None:
        self._rank = rank
        self._servers = servers
        self._egress = egress
        self._exchange = exchange
        self._counts = exchange.counts
        self._sizes = sizes
        self._tracer = tracer

    def push(self, transfer: Push) -> None:
        """Queues frames for every server of the key, also for those whose rows are not touched."""
        assert isinstance(transfer, RowsPush)
        transfer.route = self
        if not transfer.has_gradient:
            self._say_no_gradient(transfer)
            return
        key = transfer.key
        encodes = transfer.round > INITIAL_ROUND and not key.codecs.gradients.in_place
        urgent = transfer.urgent
        queued: List[Tuple[int, Frame]] = []
        for run in runs_of(key):
            ends = transfer.numbers.searchsorted((run.first, run.first + run.rows))
            start, count = int(ends[0]), int(ends[1] - ends[0])
            cut = self._cut(transfer, count)
            for piece in cut:
                rows = slice(start + piece.start, start + piece.stop)
                numbers = packed(transfer.numbers[rows] - run.first)
                # What is encoded has memory of its own; else the gradient itself is sent.
                flags = ENCODED if encodes else ACKNOWLEDGE
                header = self._header(transfer, len(cut), flags, numbers=numbers)
                frame = _RowsFrame(urgent, header)
                frame.route, frame.transfer, frame.rows = self, transfer, rows
                frame.packed, frame.encodes = numbers, encodes
                queued.append((run.server, traced(self._tracer, frame, run.server)))
        transfer.missing_frames = len(queued)
        for server, one in queued:
            self._egress.push(server, transfer.gate_step, one)
        self._counts["slices_sent"] += len(queued)

    def _say_no_gradient(self, transfer: RowsPush) -> None:
        """Has the round count this worker without a gradient. That is not a gradient without rows,
        with which an optimizer may change all rows, by momentum for example."""
        for piece in self.pieces(transfer.key, transfer.round):
            self.send_empty(transfer, piece, NO_GRADIENT)
        self._exchange.slice_sent(transfer, transfer.key.size_elems)

    def pieces(self, key: WorkerKey, round: int) -> Sequence[Slice]:
        """All that a server keeps of a key is summed by itself."""
        return key.slices(key.size_elems)

    def gradient(self, transfer: Push, piece: Slice) -> Rows:
        assert isinstance(transfer, RowsPush)
        first, row_elems = piece.offset // transfer.key.row_elems, transfer.key.row_elems
        start, end = transfer.numbers.searchsorted((first, first + piece.length // row_elems))
        numbers = (transfer.numbers[start:end] - first).astype(NUMBER)
        return Rows(numbers, transfer.elements[start:end])

    def send_empty(self, transfer: Push, piece: Slice, flags: int, workers: int = 0) -> None:
        frame = Frame(transfer.urgent, self._header(transfer, 1, flags, workers))
        self._egress.push(piece.server, transfer.gate_step, frame)

    def send_sum(
        self,
        transfer: Push,
        piece: Slice,
        parts: Sequence[Rows],
        memory: Optional[np.ndarray],
        flags: int,
        workers: int,
        is_needed: bool,
    ) -> None:
        key = transfer.key
        encodes = not key.codecs.gradients.in_place
        numbers = union([part.numbers for part in parts])
        cut = self._cut(transfer, len(numbers))
        flags |= ENCODED if encodes else 0
        for some in cut:
            as_packed = packed(numbers[some])
            header = self._header(transfer, len(cut), flags, workers, as_packed)
            frame = _SumOfRows(transfer.urgent, header)
            frame.route, frame.transfer, frame.piece, frame.parts = self, transfer, piece, parts
            frame.numbers, frame.packed, frame.encodes = numbers[some], as_packed, encodes
            frame.is_needed = is_needed and transfer.target is None and some is cut[-1]
            self._egress.push(
                piece.server, transfer.gate_step, traced(self._tracer, frame, piece.server)
            )
        self._counts["slices_sent"] += len(cut)

    def _cut(self, transfer: Transfer, rows: int) -> Sequence[slice]:
        """So many rows of a push to a server, by frame."""
        key = transfer.key
        slice_size = self._sizes.of(self._sizes.generation(transfer.round)).slice_size
        most, row_bytes = key.rows_in_slice(slice_size), key.row_elems * key.item_bytes
        return list(pieces(rows, most, row_bytes, transfer.priority))

    def _header(
        self, transfer: Push, frames: int, flags: int, workers: int = 0, numbers: Packed = _NONE
    ) -> PushRowsHeader:
        """The header of one of so many frames of a push to a server."""
        return PushRowsHeader(
            Kind.PUSH_ROWS, self._rank, flags | numbers.flags, key=transfer.key.key_id,
            round=transfer.round, step=transfer.step, priority=transfer.priority, frames=frames,
            workers=workers, first=numbers.first, rows=numbers.rows, weight=transfer.weight,
        )  # fmt: skip

    def made(self, transfer: Transfer, some: Rows, encodes: bool, numbers: Packed) -> Pieces:
        """Rows as they travel."""
        key = transfer.key
        payload: Pieces
        if encodes:
            most_bytes = key.codecs.gradients.most_bytes(some.elements.size)
            part = part_of_rows(transfer.round)
            payload = some.encoded(numbers.gaps, key.encoder, part, most_bytes)
        else:
            payload = some.in_place(numbers.gaps)
        self._counts["bytes_sent"] += size_of(payload)
        return payload

    def needed_no_more(self, transfer: RowsPush) -> None:
        """A frame needs a push's rows no more."""
        transfer.missing_frames -= 1
        if not transfer.missing_frames:
            self._exchange.slice_sent(transfer, transfer.key.size_elems)

    def sum_made(self, transfer: Push, piece: Slice) -> None:
        """A push's rows for a server are in a sum, and needed no more."""
        self._exchange.slice_sent(transfer, piece.length)

    def request(self, transfer: Pull) -> None:
        assert isinstance(transfer, RowsPull)
        transfer.route = self
        self.ask(transfer, runs_of(transfer.key))

    def ask(self, transfer: RowsPull, runs: Iterable[Run]) -> None:
        """Asks some servers for what is wanted of them."""
        asked = []
        for run in runs:
            words = self.expect(transfer, run)
            if words is not None:
                asked.append((run.server, words))
        if not asked:
            transfer.done(None)
            self._exchange.note_answered(transfer)
            return
        header = self.asking(transfer)
        for server, words in asked:
            frame = Frame(transfer.urgent, header, memoryview(words.tobytes()))
            self._servers[server].writer.push(frame)
            self._counts["bytes_sent"] += words.nbytes

    def asking(self, transfer: RowsPull, index: int = 0) -> PullRowsHeader:
        """The header of a request; of a neighbour it asks for the rows of a run."""
        if transfer.request == UNKNOWN:
            transfer.request = self._exchange.add_pull(transfer)
        flags = 0 if transfer.named is None else PullRowsHeader.NAMED
        flags |= 0 if transfer.known is None else PullRowsHeader.KNOWN
        return PullRowsHeader(
            Kind.PULL_ROWS, self._rank, flags | (EXACT if transfer.exact else 0),
            key=transfer.key.key_id, round=transfer.round, step=transfer.step,
            priority=transfer.priority, request=transfer.request, slice=index,
        )  # fmt: skip

    @classmethod
    def expect(cls, transfer: RowsPull, run: Run) -> Optional[np.ndarray]:
        """Expects a server's answer; returns the words that ask for it, None if nothing is wanted
        of the server."""
        words = cls._wanted(transfer, run)
        if words is not None:
            named, place = None, 0
            if transfer.named is not None and transfer.known is None:
                named, place = words, int(transfer.named.searchsorted(run.first))
            transfer.arriving[run.server] = Answer(run, named, place)
        return words

    @staticmethod
    def _wanted(transfer: RowsPull, run: Run) -> Optional[np.ndarray]:
        """The words of a request to a server; None if nothing is asked of it."""
        if transfer.named is None:
            since = transfer.rounds.get(run.server)
            return np.array([] if since is None else [since], NUMBER)
        start, end = transfer.named.searchsorted((run.first, run.first + run.rows))
        if start == end:
            return None
        words = transfer.named[start:end] - run.first
        if transfer.known is not None:
            words = np.concatenate([words, transfer.known[start:end]])
        return words.astype(NUMBER)

    def land(self, connection: Connection, header: RowsHeader) -> Landing:
        """Lands rows from a server; ProtocolError if no pull expects them."""
        transfer = self._exchange.pull(header.request)
        answer = None
        if isinstance(transfer, RowsPull) and transfer.key.key_id == header.key:
            answer = transfer.arriving.get(header.rank)
        if answer is None or header.frames < 1 or answer.carrier is not None:
            raise ProtocolError(
                f"it sent rows of key {header.key}, round {header.round}, which nobody waits for"
            )
        assert isinstance(transfer, RowsPull)
        key = transfer.key
        most_bytes = -1
        if header.flags & ENCODED:
            codec = key.codecs.values
            most_bytes = 0 if codec.in_place else codec.most_bytes(header.rows * key.row_elems)
        named = answer.words is not None
        most_rows = answer.run.rows if answer.words is None else len(answer.words)
        check_frame(header, most_rows, key.row_elems * key.item_bytes, most_bytes)
        if named and header.flags & GAPS:
            raise ProtocolError(f"it sent numbers of rows of {key.called} that were named to it")
        place = transfer.landing_memory(answer, header)
        payload = memory(header.payload_bytes) if place is None else place
        since_ns = now_ns() if self._tracer.enabled else 0
        return payload, _Landed(transfer, answer, payload, place is not None, since_ns)

    def take(self, connection: Connection, header: RowsHeader, landed: _Landed) -> None:
        """Takes these rows."""
        transfer, answer, payload, in_place, since_ns = landed
        trace_arrival(self._tracer, header, since_ns)
        self._counts["slices_received"] += 1
        self._counts["bytes_received"] += len(payload)
        key = transfer.key
        part = part_of_rows(header.round)
        rows = unpacked(header, payload, key.numpy_dtype, key.row_elems, key.decoder, part)
        if answer.words is not None:
            rows = Rows(answer.words[header.first : header.first + header.rows], rows.elements)
        self.add(transfer, answer, header, rows, in_place)

    def add(
        self,
        transfer: RowsPull,
        answer: Answer,
        header: RowsHeader,
        rows: Rows,
        landed: bool = False,
    ) -> None:
        """Adds a frame's rows of the run for which an answer is expected; `landed`: they are where
        they go."""
        numbers = rows.numbers
        check_numbers(numbers, answer.next_row, answer.run.rows)
        if len(numbers):
            answer.next_row = int(numbers[-1]) + 1
        transfer.received(header, answer.run, rows, landed)
        if answer.words is not None:
            answer.lacks -= len(numbers)
        if answer.missing is None:
            answer.missing = header.frames
        answer.missing -= 1
        if answer.missing:
            return
        if answer.lacks:
            raise ProtocolError(
                f"it sent {answer.lacks} rows of {transfer.key.called} less than were asked for"
            )
        transfer.rounds[answer.run.server] = header.round
        del transfer.arriving[answer.run.server]
        if not transfer.arriving:
            self._exchange.arrived(transfer, header)

    def missing(self, transfer: Transfer) -> Set[int]:
        if isinstance(transfer, RowsPull):
            return set(transfer.arriving)
        return {server for server, _ in transfer.key.runs}
