"""Local aggregation: the workers of one host send one sum of their gradients, and get one value.

The largest single gain of Parallax (S. Kim et al., EuroSys'19, table 4), and what GPUs of one host
do among themselves in BytePS. There a process of the host's own sums; here the workers do, each its
part of the slices, so a host needs no server for it.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

import numpy as np

from p3kv.common.finite import check_sum
from p3kv.config import Settings
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import Header, SliceSizesHeader, SummandHeader, UpdatedHeader, ValueHeader
from p3kv.wire.framing import Frame, PriorityQueue
from p3kv.wire.header import (
    CARRIES,
    HEADER_BYTES,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    WANTS_RESULT,
    Kind,
    clock_us,
    passed_s,
)
from p3kv.wire.messages import LastRounds, SliceSizes, encode
from p3kv.wire.slice_sizes import FIRST_GENERATION, SliceSizesByRound
from p3kv.worker.exchange import Exchange
from p3kv.worker.routes.host_memory import Carriers, HostMemory
from p3kv.worker.routes.host_pulls import HostPulls
from p3kv.worker.routes.rows import RowsPull, RowsPush, RowsRoute
from p3kv.worker.transfers import Pull, Push, Route, Transfer, WorkerKey, nothing
from p3kv.worker.tuning import Tuning

_BATCH_BYTES = 64 * 1024
"""Bytes copied before the loop looks at sockets again."""


_SumId = Tuple[int, int, int]
"""The id of a key, a round and a piece's number."""


class _Summand(NamedTuple):
    """What this worker adds to a sum that it sends."""

    transfer: Push
    piece: Slice
    counted: bool
    """Whether the server has counted this worker already."""
    gradient: Any
    """Its elements or rows; None if it has none."""
    handed_in: bool = False
    """Whether another worker was to send the sum: the elements are a copy, and the transfer needs
    nothing more."""


class _Sum:
    """A sum of a slice or run: some parts are there, or neighbours want its value."""

    __slots__ = ("came", "part", "wanting")

    def __init__(self) -> None:
        self.part: Optional[_Summand] = None
        """This worker's, until the sum is sent."""
        self.came: Dict[int, SummandHeader] = {}
        """By neighbour, the parts that are there."""
        self.wanting: Optional[List[int]] = None
        """The neighbours that want the value; None while nobody wants it."""


class CarriedSums:
    """Sends a sum as soon as the parts of all that add to it are there. Belongs to the worker's
    thread."""

    def __init__(
        self, rank: int, carriers: Carriers, memory: HostMemory, exchange: Exchange
    ) -> None:
        self._rank = rank
        self._carriers = carriers
        self._memory = memory
        self._exchange = exchange
        self._sums: Dict[_SumId, _Sum] = {}

    def join(self, transfer: Push, piece: Slice) -> None:
        """Adds this worker's own part."""
        sum_id, wants = _sum_id(transfer, piece), wants_result(transfer)
        one = self._sums.setdefault(sum_id, _Sum())
        # A sum says at the same time what its sender wants, unless another one wants more.
        counted = not self._all_came(sum_id, one) or (not wants and one.wanting is not None)
        if counted:
            transfer.key.direct.send_empty(transfer, piece, IN_HOST_SUM | wants)
        gradient = None
        if transfer.has_gradient:
            gradient = transfer.key.direct.gradient(transfer, piece)
        one.part = _Summand(transfer, piece, counted, gradient)
        self._send_if_complete(sum_id, one)

    def take_over(self, transfer: Push, piece: Slice, rows: int) -> None:
        """Adds what this worker has handed in to one that has left: it is in its memory, and the
        server has counted it."""
        gradient = None
        if transfer.has_gradient:
            gradient = self._memory.own_part(transfer.key, piece, rows)
            if not transfer.key.touched_only:
                gradient = gradient.copy()  # the sum takes its place
        one = self._sums.setdefault(_sum_id(transfer, piece), _Sum())
        one.part = _Summand(transfer, piece, True, gradient, True)

    def add(self, connection: Connection, header: SummandHeader, _: None) -> None:
        """Adds a neighbour's part; ProtocolError for one that can't be right."""
        rank, sum_id = header.rank, (header.key, header.round, header.slice)
        one = self._sums.setdefault(sum_id, _Sum())
        if rank in one.came or header.round <= INITIAL_ROUND:
            raise ProtocolError(f"it has given slice {header.slice} of key {header.key} twice")
        if not 0.0 <= header.weight < math.inf:
            raise ProtocolError(f"it weighs slice {header.slice} by {header.weight}")
        one.came[rank] = header
        if header.flags & WANTS_RESULT:
            one.wanting = [*(one.wanting or ()), rank]
        self._send_if_complete(sum_id, one)

    def send_complete(self) -> None:
        """Sends the sums that need not wait any more, now that a neighbour has left."""
        for sum_id, one in list(self._sums.items()):
            self._send_if_complete(sum_id, one)

    def take_wanting(self, transfer: Transfer, piece: Slice) -> List[int]:
        """The neighbours that want a value that has come; ProtocolError if this worker has not
        asked for it."""
        sum_id = _sum_id(transfer, piece)
        one = self._sums.get(sum_id)
        if one is None or one.wanting is None:
            raise ProtocolError(
                f"it sent the value of slice {piece.index} of {transfer.key.called}, for which "
                "another worker of this host has asked"
            )
        del self._sums[sum_id]
        return one.wanting

    def read(self, transfer: Push, piece: Slice) -> None:
        """A slice of the gradient is needed no more."""
        if transfer.target is None:
            self._exchange.slice_sent(transfer, piece.length)

    @property
    def passes_on(self) -> bool:
        """Whether values are still to come that only neighbours want."""
        return any(key.channel.relayed for key in self._exchange.keys.values())

    def clear(self) -> None:
        """The job has failed: sends nothing any more."""
        self._sums.clear()

    def _all_came(self, sum_id: _SumId, one: _Sum) -> bool:
        """Whether the neighbours' parts of a sum are there."""
        key_id, round_, _ = sum_id
        return len(one.came) == len(self._carriers.adding(key_id, round_)) - 1

    def _send_if_complete(self, sum_id: _SumId, one: _Sum) -> None:
        part, came = one.part, one.came
        if part is None or not self._all_came(sum_id, one):
            return
        one.part, one.came = None, {}
        transfer, piece = part.transfer, part.piece
        summands = {rank: header for rank, header in came.items() if not header.flags & NO_GRADIENT}
        parts = {
            rank: _weighted(
                self._memory.part(rank, transfer.key, piece, header.rows), header.weight, transfer
            )
            for rank, header in summands.items()
        }
        lacking = [header.lacking for header in summands.values()]
        if part.gradient is not None:
            parts[self._rank] = _weighted(part.gradient, transfer.weight, transfer)
            lacking.append(transfer.lacking)
        transfer.lacking = reduce(and_, lacking) if lacking else 0
        workers = len(came) + 1
        flags = CARRIES | (0 if part.counted else IN_HOST_SUM)
        if transfer.target is None and one.wanting is None:
            del self._sums[sum_id]
        else:
            flags |= WANTS_RESULT
            one.wanting = one.wanting or []
            if transfer.target is None:
                self._receive_for_others(transfer)
        if parts:
            by_rows = transfer.key.touched_only
            memory = None if by_rows else self._memory.of_sum(transfer.key, piece)
            transfer.key.direct.send_sum(
                transfer, piece, [parts[rank] for rank in sorted(parts)], memory, flags, workers,
                not part.handed_in,
            )  # fmt: skip
        else:
            transfer.key.direct.send_empty(transfer, piece, flags | NO_GRADIENT, workers)
            if not part.handed_in:
                self.read(transfer, piece)

    def _receive_for_others(self, transfer: Push) -> None:
        """Receive values that only neighbours want into the shared memory."""
        key = transfer.key
        if transfer.round in key.channel.relayed:
            return
        target = self._memory.own_values(key).ctypes.data
        values = Pull(key, transfer.round, transfer.step, 0, target, nothing)
        values.route = transfer.route
        values.missing_elems = sum(
            piece.length
            for piece in key.direct.pieces(key, transfer.round)
            if self._carriers.carrier(key, piece, transfer.round) == self._rank
        )
        self._exchange.relay(values)


def _weighted(part: Any, weight: float, transfer: Push) -> Any:
    """A worker's part of a sum as it counts there: a copy, unless its weight is 1."""
    if weight == 1.0:
        return part
    rows, dtype = transfer.key.touched_only, transfer.key.sum_dtype
    with np.errstate(over="ignore", invalid="ignore"):
        elements = np.multiply(part.elements if rows else part, weight, dtype=dtype)
    return part._replace(elements=elements) if rows else elements


def wants_result(transfer: Transfer) -> int:
    """The flag by which a push asks for its result, if it does."""
    return 0 if transfer.target is None else WANTS_RESULT


def _sum_id(transfer: Transfer, piece: Slice) -> _SumId:
    return transfer.key.key_id, transfer.round, piece.index


class HostSums(Route):
    """Sums slices, and rows, with the neighbours, the other workers of this host.

    For each slice one of the workers is the carrier. The others copy their slices into memory that
    they share with it, and tell it so (SUMMAND); the carrier sends the sum when all are there. It
    receives the value, copies it into its shared memory, and tells the others that want it (VALUE),
    which copy it where it belongs. Each worker sends the server a frame of its own all the same,
    without elements when its slice is in a sum. Of a key of rows, all rows that a server keeps are
    in place of a slice, and their values come by pulls (`HostPulls`). docs/design.md ("Each byte
    once for a host") says why memory is not written too early, and what holds where workers leave.
    Belongs to the worker's thread.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Mapping[int, Connection],
        settings: Settings,
        sizes: SliceSizesByRound,
        tuning: Tuning,
        rows: RowsRoute,
        exchange: Exchange,
    ) -> None:
        """`neighbours` are there before the first key is declared."""
        self._rank = rank
        self._neighbours = neighbours
        self._sizes = sizes
        self._tuning = tuning
        self._exchange = exchange
        self._passed_on = FIRST_GENERATION
        """The newest generation whose slice sizes neighbours know from this worker, or at once."""
        self._carriers = Carriers(rank, neighbours, settings.deterministic)
        self._checks_finite = settings.check_finite
        self._queue: PriorityQueue[Tuple[Push, Slice]] = PriorityQueue()
        """What of this worker's is to be copied or added."""
        self._memory = HostMemory(rank, neighbours)
        self._carried = CarriedSums(rank, self._carriers, self._memory, exchange)
        self._pulls = HostPulls(rank, neighbours, self._carriers, rows, exchange)
        self._last_pushed: Dict[int, int] = {}
        """By key, the last round for which this worker has pushed; also of keys that it has
        forgotten."""
        self.arrivals: Mapping[int, Callable[[Connection, Any, Any], None]] = {
            Kind.MEMORY: self._memory.open,
            Kind.SUMMAND: self._carried.add,
            Kind.VALUE: self._take_value,
            Kind.SLICE_SIZES: self._take_slice_sizes,
            Kind.PULL_ROWS: self._pulls.take_ask,
            Kind.ROWS: self._pulls.take_rows,
            Kind.BYE: self._go_on_without,
        }
        """What neighbours say, as in `Handler`."""
        self.landings: Mapping[int, Callable[[Connection, Any], Landing]] = {
            Kind.PULL_ROWS: self._pulls.land_ask,
            Kind.ROWS: self._pulls.land_rows,
        }

    def takes(self, key: WorkerKey) -> bool:
        """Whether a key is summed with neighbours; all of a host answer alike."""
        return bool(self._neighbours) and key.sums_on_hosts

    def push(self, transfer: Push) -> None:
        """Adds a push to the host's sums, by urgency, as soon as the round before has ended. Worker
        rank 0 alone gives initial values."""
        if transfer.round == INITIAL_ROUND:
            transfer.key.direct.push(transfer)
            return
        transfer.route = self
        self._last_pushed[transfer.key.key_id] = transfer.round
        if transfer.round == transfer.key.channel.ended + 1:
            self._begin(transfer)

    def request(self, transfer: Pull) -> None:
        """Each worker asks for itself, except for rows of an open round whose older values it does
        not know."""
        is_open = transfer.round > transfer.key.channel.ended
        if isinstance(transfer, RowsPull) and is_open and transfer.known is None:
            transfer.route = self
            self._pulls.ask(transfer)
        else:
            transfer.key.direct.request(transfer)

    def missing(self, transfer: Transfer) -> Set[int]:
        """Only those of slices, or rows, that this worker carries."""
        if isinstance(transfer, RowsPull):
            return self._pulls.missing(transfer)
        key = transfer.key
        return {
            piece.server
            for piece in key.direct.pieces(key, transfer.round)
            if transfer.misses(piece)
            and self._carriers.carrier(key, piece, transfer.round) == self._rank
        }

    def ended(self, transfer: Push) -> None:
        following = transfer.key.channel.in_flight.get(transfer.round + 1)
        if following is not None:
            self._begin(following)
        self._pulls.round_ended(transfer)

    def _begin(self, transfer: Push) -> None:
        transfer.pieces = transfer.key.direct.pieces(transfer.key, transfer.round)
        for piece in transfer.pieces:
            self._queue.push(transfer.urgent, (transfer, piece))

    def work(self) -> bool:
        """Copies or adds some gradients; returns whether there are more. To be called between two
        looks at the sockets, also when there is nothing to add. NotFinite for a gradient of this
        worker that must not be summed."""
        done_bytes = 0
        while self._queue.heap and done_bytes < _BATCH_BYTES:
            transfer, piece = self._queue.pop()
            piece_bytes = piece.length * transfer.key.item_bytes
            done_bytes += HEADER_BYTES + min(transfer.size_bytes, piece_bytes)
            if self._checks_finite and transfer.has_gradient:
                gradient = transfer.key.direct.gradient(transfer, piece)
                elements = gradient.elements if transfer.key.touched_only else gradient
                check_sum(elements, transfer.key.called, transfer.round, self._rank)
            carrier = self._carriers.carrier(transfer.key, piece, transfer.round)
            if carrier == self._rank:
                self._carried.join(transfer, piece)
            else:
                self._hand_in(transfer, piece, carrier)
        return bool(self._queue.heap)

    def landed(self, transfer: Transfer, piece: Slice, header: UpdatedHeader) -> None:
        """Gives the neighbours that want it a slice's value."""
        key = transfer.key
        wanting = self._carried.take_wanting(transfer, piece)
        has_value = header.payload_bytes > 0
        if wanting:
            if has_value:
                value = np.frombuffer(transfer.in_target(piece), key.numpy_dtype)
                self._memory.own_value(key, piece)[:] = value
            self._pass_terms_on()
        value_header = ValueHeader(
            Kind.VALUE, self._rank,
            (header.flags & NO_GRADIENT) | (0 if has_value else ValueHeader.SUM_AS_BEFORE),
            key=key.key_id, slice=piece.index, round=transfer.round,
            # All workers of a host have the same clock.
            ready_us=clock_us(transfer.ready_s + header.late_us / 1e6), worked_us=header.worked_us,
        )  # fmt: skip
        for rank in wanting:
            self._tell(rank, transfer, value_header)

    @property
    def needed(self) -> bool:
        """Whether rounds are open in which neighbours may need this worker, or values are to come
        that only they want."""
        if self._carried.passes_on or self._pulls.passes_on:
            return True
        return any(push.route is self for push in self._exchange.in_flight())

    def leave(self) -> None:
        """Ask the servers for nothing more that neighbours want."""
        self._pulls.clear()

    def goodbye(self) -> bytes:
        """The payload of this worker's goodbye to its neighbours."""
        self.leave()
        return encode(LastRounds(self._last_pushed))

    def clear(self) -> None:
        """The job has failed: nothing is read or written any more."""
        self._queue.clear()
        self._carried.clear()
        self._pulls.clear()

    def close(self) -> None:
        """Shares nothing with those that have not opened it. May be called twice."""
        self._memory.close()

    def _pass_terms_on(self) -> None:
        while self._passed_on < self._sizes.last_generation:
            self._passed_on += 1
            words = memoryview(encode(self._sizes.of(self._passed_on)))
            from_round = self._sizes.first_round(self._passed_on)
            header = SliceSizesHeader(Kind.SLICE_SIZES, self._rank, from_round=from_round)
            for connection in self._neighbours.values():
                connection.writer.push(Frame(URGENT, header, words))

    # What this worker's slices are for.

    def _hand_in(self, transfer: Push, piece: Slice, carrier: int) -> None:
        key, rows = transfer.key, 0
        if transfer.has_gradient:
            rows = self._memory.hand_in(key, piece, key.direct.gradient(transfer, piece))
        if isinstance(transfer, RowsPush):
            transfer.handed_in[piece.index] = rows
        self._tell_part(transfer, piece, carrier, rows)
        key.direct.send_empty(transfer, piece, IN_HOST_SUM | wants_result(transfer))
        self._carried.read(transfer, piece)

    def _tell_part(self, transfer: Push, piece: Slice, carrier: int, rows: int) -> None:
        header = SummandHeader(
            Kind.SUMMAND, self._rank,
            wants_result(transfer) | (0 if transfer.has_gradient else NO_GRADIENT),
            key=transfer.key.key_id, slice=piece.index, round=transfer.round, rows=rows,
            lacking=transfer.lacking, weight=transfer.weight,
        )  # fmt: skip
        self._tell(carrier, transfer, header)

    # What neighbours say.

    def _take_slice_sizes(
        self, connection: Connection, header: SliceSizesHeader, sizes: SliceSizes
    ) -> None:
        self._tuning.adopt(header.from_round, sizes)

    def _take_value(self, connection: Connection, header: ValueHeader, _: None) -> None:
        rank = header.rank
        transfer, piece = self._find(header)
        if rank != self._carriers.carrier(transfer.key, piece, transfer.round):
            raise ProtocolError(f"it has the value of slice {piece.index}, which another carries")
        memory = transfer.land(piece, piece.server)
        if header.flags & NO_GRADIENT and transfer.has_gradient:
            raise ProtocolError(
                f"it says that no worker had a gradient of {transfer.key.called}, and this one had"
            )
        if not header.flags & header.SUM_AS_BEFORE:
            value = self._memory.value(rank, transfer.key, piece)
            np.frombuffer(memory, value.dtype)[:] = value
        late_s = passed_s(clock_us(transfer.ready_s), header.ready_us)
        as_sent = UpdatedHeader(
            Kind.UPDATED, piece.server, header.flags & NO_GRADIENT, key=header.key,
            slice=header.slice, round=header.round, step=transfer.step, priority=transfer.priority,
            late_us=clock_us(max(0.0, late_s)), worked_us=header.worked_us,
        )  # fmt: skip
        self._exchange.slice_arrived(transfer, piece, as_sent)

    def _go_on_without(self, connection: Connection, header: Header, last: LastRounds) -> None:
        """A neighbour has left: others carry its slices of the rounds for which it has not
        pushed."""
        rank = header.rank
        queued = {(one.key.key_id, piece.index) for one, piece in self._queue}
        orphans = [
            (push, piece)
            for push in self._exchange.in_flight()
            if push.route is self and push.round == push.key.channel.ended + 1
            if last.rounds.get(push.key.key_id, INITIAL_ROUND) < push.round
            for piece in push.key.direct.pieces(push.key, push.round)
            if self._carriers.carrier(push.key, piece, push.round) == rank
            and (push.key.key_id, piece.index) not in queued
        ]
        self._carriers.leave(rank, last.rounds)
        for transfer, piece in orphans:
            rows = transfer.handed_in[piece.index] if isinstance(transfer, RowsPush) else 0
            carrier = self._carriers.carrier(transfer.key, piece, transfer.round)
            if carrier == self._rank:
                self._carried.take_over(transfer, piece, rows)
            else:
                self._tell_part(transfer, piece, carrier, rows)
        self._carried.send_complete()
        self._pulls.go_on_without(rank)

    def _find(self, header: ValueHeader) -> Tuple[Transfer, Slice]:
        """The transfer and the slice that a neighbour's frame names."""
        transfer = self._exchange.update(header.key, header.round)
        if transfer is not None and transfer.route is self:
            slices = transfer.key.direct.pieces(transfer.key, header.round)
            if header.slice < len(slices):
                return transfer, slices[header.slice]
        raise ProtocolError(
            f"it has a value for key {header.key}, slice {header.slice}, round {header.round}, "
            "for which nobody waits"
        )

    def _tell(
        self, rank: int, transfer: Transfer, header: Union[SummandHeader, ValueHeader]
    ) -> None:
        frame = Frame(transfer.urgent, header)
        self._neighbours[rank].writer.push(frame)
