"""Local aggregation: the workers of one host send one sum of their gradients, and get one value.

The largest single gain of Parallax (S. Kim et al., EuroSys'19, table 4), and what GPUs of one host
do among themselves in BytePS. There a process of the host's own sums; here the workers do, each its
part of the slices, so a host needs no server for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.fields import PushHeader, SummandHeader, TermsHeader, UpdatedHeader, ValueHeader
from p3kv.wire.framing import Frame, Landing, message_landing
from p3kv.wire.header import (
    HEADER_BYTES,
    INITIAL_ROUND,
    NO_GRADIENT,
    URGENT,
    WANTS_RESULT,
    Kind,
    clock_us,
    passed_s,
)
from p3kv.wire.messages import Terms, encode
from p3kv.wire.queue import PriorityQueue, urgency
from p3kv.wire.terms import FIRST_GENERATION, TermsByRound
from p3kv.worker.in_progress import InProgress
from p3kv.worker.routes.host_memory import HostMemory
from p3kv.worker.routes.slices import SliceRoute
from p3kv.worker.transfers import Route, Transfer, WorkerKey

_BATCH_BYTES = 64 * 1024
"""What is copied before the loop looks at sockets again."""

_Place = Tuple[int, int, int]
"""The id of a key, a round and a slice's number."""


class _Part(NamedTuple):
    """What this worker adds to a sum that it sends."""

    transfer: Transfer
    piece: Slice
    announced: bool
    """Whether the server knows already that the sum will come."""


class _Round(NamedTuple):
    """What this worker pushes in a round of a key."""

    transfer: Transfer
    slices: Sequence[Slice]
    urgent: int


class HostSums(Route):
    """Sums slices with the neighbours, the other workers of this host.

    For each slice one of the workers is the carrier. The others copy their slices into memory that
    they share with it, and tell it so (SUMMAND); the carrier sends the sum when all are there. It
    receives the value, copies it into its shared memory, and tells the others (VALUE), which copy
    it where it belongs. Each worker sends the server a frame of its own all the same, without
    elements when its slice is in a sum. So the server counts by rank and round as ever, knows who
    is late, and what a worker says before its slices is there before they count.

    For each key a worker shares memory for what it adds or sends, and as much for values, of which
    only those take any that it has received. Nothing is written before all have read what was
    there, whatever the size of slices: a worker adds to a round of a key when the round before has
    ended for it, so all its parts are read; and a value comes when all have added to its round, so
    all have read the values of the round before.

    Workers may want the result of a round or not, as in `push` and `pushpull`, and need not agree.

    A worker that has a round's values goes on, and must know the slice size of the rounds that it
    goes on with. Servers say it before the values, but to each worker over its own connection. So a
    carrier passes on what it knows of slice sizes before it tells of a value.

    Belongs to the worker's thread.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Mapping[int, Connection],
        deterministic: bool,
        terms: TermsByRound,
        announced: Callable[[int, Terms], None],
        slices: SliceRoute,
        in_progress: InProgress,
    ) -> None:
        """`neighbours` are there before the first key is declared. `announced` takes terms, and
        from which round on they hold. `slices` brings to the servers, and from them, what one
        worker carries for all."""
        self._rank = rank
        self._neighbours = neighbours
        self._terms = terms
        self._announced = announced
        self._slices = slices
        self._in_progress = in_progress
        self._passed_on = FIRST_GENERATION
        """The newest generation of terms that the neighbours know from this worker, or at once."""
        self._deterministic = deterministic
        self._all: List[int] = []
        self._queue: PriorityQueue[Tuple[Transfer, Slice]] = PriorityQueue()
        """Slices of this worker that are to be copied or added."""
        self._parts: Dict[_Place, _Part] = {}
        self._came: Dict[_Place, Dict[int, bool]] = {}
        """The neighbours whose parts of a sum are there, and whether they have a gradient."""
        self._memory = HostMemory(rank, neighbours)
        self._rounds: Dict[Tuple[int, int], _Round] = {}
        """By key and round: what is under way, or waits for the end of the round before."""
        self._ended: Dict[int, int] = {}
        """By key, the last round that has ended."""
        self._wanting: Dict[_Place, List[int]] = {}
        """The neighbours that want the value of a slice that this worker carries."""
        self._for_others: Dict[int, int] = {}
        """By key, the newest round whose values this worker receives only for its neighbours."""
        self.takers: Mapping[int, Callable[[int, Any], Landing]] = {
            Kind.MEMORY: self._memory.land,
            Kind.SUMMAND: lambda rank, header: Landing(None, partial(self._add, rank, header)),
            Kind.VALUE: lambda rank, header: Landing(None, partial(self._value, rank, header)),
            Kind.TERMS: lambda rank, header: message_landing(
                header, Terms, partial(self._announced, header.from_round)
            ),
        }

    @property
    def has_neighbours(self) -> bool:
        """Whether there is anybody with whom to sum; all of a host answer alike."""
        return len(self._neighbours) > 0

    def push(self, transfer: Transfer) -> None:
        """Adds a push's slices to the host's sums, by urgency, as soon as the round before has
        ended. Worker rank 0 alone gives initial values."""
        if transfer.round == INITIAL_ROUND:
            self._slices.push(transfer)
            return
        transfer.route = self
        key_id = transfer.key.key_id
        slices = self._slices.slices(transfer.key, transfer.round)
        urgent = urgency(transfer.step, transfer.priority)
        self._rounds[key_id, transfer.round] = _Round(transfer, slices, urgent)
        if transfer.round == self._ended.get(key_id, INITIAL_ROUND) + 1:
            self._begin(key_id, transfer.round)

    def request(self, transfer: Transfer) -> None:
        """Each worker asks for itself."""
        self._slices.request(transfer)

    def missing(self, transfer: Transfer) -> Set[int]:
        """Only those of slices that this worker carries."""
        slices = self._slices.slices(transfer.key, transfer.round)
        return {
            piece.server
            for piece in slices
            if transfer.misses(piece) and self.carrier(transfer.key, piece) == self._rank
        }

    def ended(self, transfer: Transfer) -> None:
        key_id = transfer.key.key_id
        del self._rounds[key_id, transfer.round]
        self._ended[key_id] = transfer.round
        self._begin(key_id, transfer.round + 1)

    def _begin(self, key_id: int, round: int) -> None:
        begun = self._rounds.get((key_id, round))
        if begun is not None:
            for piece in begun.slices:
                self._queue.push(begun.urgent, (begun.transfer, piece))

    def work(self) -> bool:
        """Copies or adds some slices; returns whether there are more. To be called between two
        looks at the sockets."""
        done_bytes = 0
        while self._queue.heap and done_bytes < _BATCH_BYTES:
            transfer, piece = self._queue.pop()
            done_bytes += HEADER_BYTES + piece.length * transfer.key.item_bytes
            carrier = self.carrier(transfer.key, piece)
            if carrier == self._rank:
                self._join(transfer, piece)
            else:
                self._hand_in(transfer, piece, carrier)
        return bool(self._queue.heap)

    def landed(self, transfer: Transfer, piece: Slice, header: UpdatedHeader) -> None:
        """Gives the neighbours that want it a slice's value."""
        assert transfer.target is not None
        key = transfer.key
        wanting = self._wanting.pop((key.key_id, transfer.round, piece.index), None)
        if wanting is None:
            raise ProtocolError(
                f"it sent the value of slice {piece.index} of {key.called}, for which another "
                "worker of this host has asked"
            )
        has_value = header.payload_bytes > 0
        if wanting:
            if has_value:
                value = _elements(transfer, transfer.target, piece)
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

    def carrier(self, key: WorkerKey, piece: Slice) -> int:
        """The worker of the host that sends and receives a slice for all.

        All carry alike; in deterministic mode it is the first one, so that the sums of hosts are
        added in the same order whatever the size of slices.
        """
        turn = 0 if self._deterministic else (key.key_id + piece.index) % len(self._ranks)
        return self._ranks[turn]

    def clear(self) -> None:
        """The job has failed: nothing is read or written any more."""
        self._queue.clear()
        self._parts.clear()
        self._rounds.clear()

    def close(self) -> None:
        """Shares nothing with those that have not opened it. May be called twice."""
        self._memory.close()

    @property
    def _ranks(self) -> List[int]:
        """Of all workers of the host that sum together."""
        if len(self._all) <= len(self._neighbours):
            self._all = sorted([self._rank, *self._neighbours])
        return self._all

    def _pass_terms_on(self) -> None:
        while self._passed_on < self._terms.last_generation:
            self._passed_on += 1
            words = memoryview(encode(self._terms.of(self._passed_on)))
            from_round = self._terms.first_round(self._passed_on)
            header = TermsHeader(Kind.TERMS, self._rank, from_round=from_round)
            for connection in self._neighbours.values():
                connection.writer.push(Frame(URGENT, header, words))

    # What this worker's slices are for.

    def _hand_in(self, transfer: Transfer, piece: Slice, carrier: int) -> None:
        key = transfer.key
        wants = 0 if transfer.target is None else WANTS_RESULT
        if transfer.has_gradient:
            assert transfer.source is not None
            part = self._memory.own_part(key, piece)
            part[:] = _elements(transfer, transfer.source, piece)
        header = SummandHeader(
            Kind.SUMMAND, self._rank, wants | (0 if transfer.has_gradient else NO_GRADIENT),
            key=key.key_id, slice=piece.index, round=transfer.round,
        )  # fmt: skip
        self._tell(carrier, transfer, header)
        self._slices.send(transfer, piece, None, PushHeader.IN_HOST_SUM | wants)
        self._read(transfer, piece)

    def _join(self, transfer: Transfer, piece: Slice) -> None:
        place = (transfer.key.key_id, transfer.round, piece.index)
        wants = 0 if transfer.target is None else WANTS_RESULT
        complete = len(self._came.get(place, ())) == len(self._neighbours)
        # A sum says at the same time what its sender wants, unless another one wants more.
        announced = not complete or (not wants and place in self._wanting)
        if announced:
            flags = PushHeader.IN_HOST_SUM | PushHeader.CARRIES | wants
            self._slices.send(transfer, piece, None, flags)
        self._parts[place] = _Part(transfer, piece, announced)
        self._send_if_complete(place)

    def _add(self, rank: int, header: SummandHeader) -> None:
        place = (header.key, header.round, header.slice)
        came = self._came.setdefault(place, {})
        if rank in came or header.round <= INITIAL_ROUND:
            raise ProtocolError(f"it has given slice {header.slice} of key {header.key} twice")
        came[rank] = not header.flags & NO_GRADIENT
        if header.flags & WANTS_RESULT:
            self._wanting.setdefault(place, []).append(rank)
        self._send_if_complete(place)

    def _send_if_complete(self, place: _Place) -> None:
        came = self._came.get(place, {})
        if len(came) < len(self._neighbours) or place not in self._parts:
            return
        del self._came[place]
        transfer, piece, announced = self._parts.pop(place)
        came[self._rank] = transfer.has_gradient
        parts = [self._part(rank, transfer, piece) for rank in self._ranks if came[rank]]
        flags = PushHeader.CARRIES if announced else 0
        if transfer.target is not None or place in self._wanting:
            flags |= WANTS_RESULT
            self._wanting.setdefault(place, [])
            if transfer.target is None:
                self._receive_for_others(transfer)
        if parts:
            total = partial(self._sum, parts, transfer, piece)
            self._slices.send_sum(transfer, piece, total, flags)
        else:
            self._slices.send(transfer, piece, None, flags | NO_GRADIENT)
            self._read(transfer, piece)

    def _sum(self, parts: Sequence[np.ndarray], transfer: Transfer, piece: Slice) -> memoryview:
        """The sum, in the order of the parts; made when it begins to leave."""
        total = self._memory.of_sum(transfer.key, piece)
        if len(parts) == 1:
            total[:] = parts[0]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(parts[0], parts[1], out=total, dtype=total.dtype)
                for part in parts[2:]:
                    np.add(total, part, out=total)
        self._read(transfer, piece)
        return total.data.cast("B")

    def _read(self, transfer: Transfer, piece: Slice) -> None:
        """A slice of the gradient is needed no more."""
        if transfer.target is None:
            self._in_progress.slice_sent(transfer, piece.length)

    def _receive_for_others(self, transfer: Transfer) -> None:
        """Has the values arrive in the shared memory of which only neighbours want any."""
        key = transfer.key
        if self._for_others.get(key.key_id) == transfer.round:
            return
        self._for_others[key.key_id] = transfer.round
        values = Transfer(
            key, transfer.round, transfer.step, transfer.priority, None,
            self._memory.own_values(key).ctypes.data, lambda error: None,
        )  # fmt: skip
        values.route = self
        slices = self._rounds[key.key_id, transfer.round].slices
        values.missing_elems = sum(
            piece.length for piece in slices if self.carrier(key, piece) == self._rank
        )
        self._in_progress.add_update(values)

    def _part(self, rank: int, transfer: Transfer, piece: Slice) -> np.ndarray:
        if rank == self._rank:
            assert transfer.source is not None
            return _elements(transfer, transfer.source, piece)
        return self._memory.part(rank, transfer.key, piece)

    # What neighbours say.

    def _value(self, rank: int, header: ValueHeader) -> None:
        transfer, piece = self._find(header)
        if rank != self.carrier(transfer.key, piece):
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
        self._in_progress.slice_arrived(transfer, piece.length, piece.server, as_sent)

    def _find(self, header: ValueHeader) -> Tuple[Transfer, Slice]:
        """The transfer and the slice of which a neighbour's frame speaks."""
        transfer = self._in_progress.update(header.key, header.round)
        if transfer is not None and transfer.route is self:
            slices = self._slices.slices(transfer.key, header.round)
            if header.slice < len(slices):
                return transfer, slices[header.slice]
        raise ProtocolError(
            f"it has a value for key {header.key}, slice {header.slice}, round {header.round}, "
            "for which nobody waits"
        )

    def _tell(self, rank: int, transfer: Transfer, header: SummandHeader) -> None:
        frame = Frame(urgency(transfer.step, transfer.priority), header)
        self._neighbours[rank].writer.push(frame)


def _elements(transfer: Transfer, array: int, piece: Slice) -> np.ndarray:
    """A slice of the array at an address."""
    return np.frombuffer(transfer.memory(array, piece), transfer.key.numpy_dtype)
