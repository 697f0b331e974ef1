"""The sums of its host that a worker carries: it sends them, and receives their values for all."""

from __future__ import annotations

from functools import partial, reduce
from operator import and_
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.fields import SummandHeader
from p3kv.wire.header import CARRIES, IN_HOST_SUM, INITIAL_ROUND, NO_GRADIENT, WANTS_RESULT
from p3kv.worker.exchange import Exchange
from p3kv.worker.routes.carriers import Carriers
from p3kv.worker.routes.host_memory import HostMemory
from p3kv.worker.transfers import Transfer

_Place = Tuple[int, int, int]
"""The id of a key, a round and a piece's number."""


class _Part(NamedTuple):
    """Part that this worker adds to a sum that it sends."""

    transfer: Transfer
    piece: Slice
    counted: bool
    """Whether the server has counted this worker already."""
    gradient: Any
    """Its elements or rows; None if it has none."""
    handed_in: bool = False
    """Whether another worker was to send the sum: the elements are a copy, and the transfer needs
    nothing more."""


class _Sum:
    """A sum of a slice or run, of which something is there, or whose value neighbours want."""

    __slots__ = ("came", "part", "wanting")

    def __init__(self) -> None:
        self.part: Optional[_Part] = None
        """This worker's, until the sum is sent."""
        self.came: Dict[int, SummandHeader] = {}
        """By neighbour, the parts that are there."""
        self.wanting: Optional[List[int]] = None
        """The neighbours that want the value; None while nobody wants it."""


class Carried:
    """Sends a sum as soon as the parts of all that add to it are there.

    Belongs to the worker's thread.
    """

    def __init__(
        self,
        rank: int,
        carriers: Carriers,
        memory: HostMemory,
        exchange: Exchange,
        on_passed: Callable[[], None],
    ) -> None:
        """`on_passed` is called when all values of a round have come that only neighbours want."""
        self._rank = rank
        self._carriers = carriers
        self._memory = memory
        self._exchange = exchange
        self._on_passed = on_passed
        self._sums: Dict[_Place, _Sum] = {}
        self._passing = 0
        """How many rounds have values to come that only neighbours want."""

    def join(self, transfer: Transfer, piece: Slice) -> None:
        """Adds this worker's own part."""
        place, wants = _place(transfer, piece), wants_result(transfer)
        one = self._sums.setdefault(place, _Sum())
        # A sum says at the same time what its sender wants, unless another one wants more.
        counted = not self._all_came(place, one) or (not wants and one.wanting is not None)
        if counted:
            transfer.key.direct.send_empty(transfer, piece, IN_HOST_SUM | wants)
        gradient = None
        if transfer.has_gradient:
            gradient = transfer.key.direct.gradient(transfer, piece)
        one.part = _Part(transfer, piece, counted, gradient)
        self._send_if_complete(place, one)

    def take_over(self, transfer: Transfer, piece: Slice, rows: int) -> None:
        """Adds what this worker has handed in to one that has left: it is in its memory, and the
        server has counted it."""
        gradient = None
        if transfer.has_gradient:
            gradient = self._memory.own_part(transfer.key, piece, rows)
            if not transfer.key.touched_only:
                gradient = gradient.copy()  # the sum takes its place
        one = self._sums.setdefault(_place(transfer, piece), _Sum())
        one.part = _Part(transfer, piece, True, gradient, True)

    def add(self, connection: Connection, header: SummandHeader, _: None) -> None:
        """Adds a neighbour's part; ProtocolError for one that can't be right."""
        rank = header.rank
        place = (header.key, header.round, header.slice)
        one = self._sums.setdefault(place, _Sum())
        if rank in one.came or header.round <= INITIAL_ROUND:
            raise ProtocolError(f"it has given slice {header.slice} of key {header.key} twice")
        one.came[rank] = header
        if header.flags & WANTS_RESULT:
            one.wanting = [*(one.wanting or ()), rank]
        self._send_if_complete(place, one)

    def send_complete(self) -> None:
        """Sends the sums that need not wait any more, now that a neighbour has left."""
        for place, one in list(self._sums.items()):
            self._send_if_complete(place, one)

    def take_wanting(self, transfer: Transfer, piece: Slice) -> List[int]:
        """The neighbours that want a value that has come; ProtocolError if this worker has not
        asked for it."""
        place = _place(transfer, piece)
        one = self._sums.get(place)
        if one is None or one.wanting is None:
            raise ProtocolError(
                f"it sent the value of slice {piece.index} of {transfer.key.called}, for which "
                "another worker of this host has asked"
            )
        del self._sums[place]
        return one.wanting

    def read(self, transfer: Transfer, piece: Slice) -> None:
        """A slice of the gradient is needed no more."""
        if transfer.target is None:
            self._exchange.slice_sent(transfer, piece.length)

    @property
    def passes_on(self) -> bool:
        """Whether values are still to come that only neighbours want."""
        return self._passing > 0

    def clear(self) -> None:
        """The job has failed: sends nothing any more."""
        self._sums.clear()

    def _all_came(self, place: _Place, one: _Sum) -> bool:
        """Whether the neighbours' parts of a sum are there."""
        key_id, round_, _ = place
        return len(one.came) == len(self._carriers.adding(key_id, round_)) - 1

    def _send_if_complete(self, place: _Place, one: _Sum) -> None:
        part, came = one.part, one.came
        if part is None or not self._all_came(place, one):
            return
        one.part, one.came = None, {}
        transfer, piece = part.transfer, part.piece
        summands = {rank: header for rank, header in came.items() if not header.flags & NO_GRADIENT}
        parts = {
            rank: self._memory.part(rank, transfer.key, piece, header.rows)
            for rank, header in summands.items()
        }
        lacking = [header.lacking for header in summands.values()]
        if part.gradient is not None:
            parts[self._rank] = part.gradient
            lacking.append(transfer.lacking)
        transfer.lacking = reduce(and_, lacking) if lacking else 0
        workers = len(came) + 1
        flags = CARRIES | (0 if part.counted else IN_HOST_SUM)
        if transfer.target is None and one.wanting is None:
            del self._sums[place]
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
                partial(self._have_read, part),
            )  # fmt: skip
        else:
            transfer.key.direct.send_empty(transfer, piece, flags | NO_GRADIENT, workers)
            self._have_read(part)

    def _have_read(self, part: _Part) -> None:
        if not part.handed_in:
            self.read(part.transfer, part.piece)

    def _receive_for_others(self, transfer: Transfer) -> None:
        """Has the values arrive in the shared memory of which only neighbours want any."""
        key = transfer.key
        if transfer.round in key.channel.relayed:
            return
        values = Transfer(
            key, transfer.round, transfer.step, transfer.priority, None,
            self._memory.own_values(key).ctypes.data, self._passed,
        )  # fmt: skip
        values.route = transfer.route
        values.missing_elems = sum(
            piece.length
            for piece in key.direct.pieces(key, transfer.round)
            if self._carriers.carrier(key, piece, transfer.round) == self._rank
        )
        self._passing += 1
        self._exchange.relay(values)

    def _passed(self, error: Optional[BaseException]) -> None:
        self._passing -= 1
        if error is None:
            self._on_passed()


def wants_result(transfer: Transfer) -> int:
    """The flag by which a push asks for its result, if it does."""
    return 0 if transfer.target is None else WANTS_RESULT


def _place(transfer: Transfer, piece: Slice) -> _Place:
    return transfer.key.key_id, transfer.round, piece.index
