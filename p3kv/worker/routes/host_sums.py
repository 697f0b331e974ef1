"""Local aggregation: the workers of one host send one sum of their gradients, and get one value.

The largest single gain of Parallax (S. Kim et al., EuroSys'19, table 4), and what GPUs of one host
do among themselves in BytePS. There a process of the host's own sums; here the workers do, each its
part of the slices, so a host needs no server for it.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Set, Tuple, Union

import numpy as np

from p3kv.common.finite import check_sum
from p3kv.config import Settings
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import Header, SliceSizesHeader, SummandHeader, UpdatedHeader, ValueHeader
from p3kv.wire.framing import Frame, PriorityQueue
from p3kv.wire.header import (
    HEADER_BYTES,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    Kind,
    clock_us,
    passed_s,
)
from p3kv.wire.messages import LastRounds, SliceSizes, encode
from p3kv.wire.slice_sizes import FIRST_GENERATION, SliceSizesByRound
from p3kv.worker.exchange import Exchange
from p3kv.worker.routes.carried import CarriedSums, Carriers, wants_result
from p3kv.worker.routes.host_memory import HostMemory
from p3kv.worker.routes.host_pulls import HostPulls
from p3kv.worker.routes.rows import RowsPull, RowsPush, RowsRoute
from p3kv.worker.transfers import Pull, Push, Route, Transfer, WorkerKey
from p3kv.worker.tuning import Tuning

_BATCH_BYTES = 64 * 1024
"""Bytes copied before the loop looks at sockets again."""


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
