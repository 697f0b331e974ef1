"""Which worker of a host carries a sum, and what it does: it sends the sum, and receives its value
for all."""

from __future__ import annotations

import math
from functools import reduce
from operator import and_
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.fields import SummandHeader
from p3kv.wire.header import CARRIES, IN_HOST_SUM, INITIAL_ROUND, NO_GRADIENT, WANTS_RESULT
from p3kv.worker.exchange import Exchange
from p3kv.worker.routes.host_memory import HostMemory
from p3kv.worker.transfers import Pull, Push, Transfer, WorkerKey

_SumId = Tuple[int, int, int]
"""The id of a key, a round and a piece's number."""


class Carriers:
    """The workers of this host, some of which may have left. Belongs to the worker's thread."""

    def __init__(
        self, rank: int, neighbours: Mapping[int, Connection], deterministic: bool
    ) -> None:
        """`rank` is this worker's; `neighbours` are there before the first key is declared."""
        self._rank = rank
        self._neighbours = neighbours
        self._deterministic = deterministic
        self._all: List[int] = []
        self._left: Dict[int, Mapping[int, int]] = {}
        """By neighbour that has left, and key, the last round for which it has pushed."""

    def leave(self, rank: int, last_rounds: Mapping[int, int]) -> None:
        """A neighbour has left. By key, the last round for which it has pushed, if there is any."""
        self._left[rank] = last_rounds

    def adding(self, key_id: int, round: int) -> Sequence[int]:
        """The ranks of those that push for a round, as far as is known, in ascending order."""
        if len(self._all) <= len(self._neighbours):
            self._all = sorted([self._rank, *self._neighbours])
        if not self._left:
            return self._all
        return [
            rank
            for rank in self._all
            if rank not in self._left or round <= self._left[rank].get(key_id, INITIAL_ROUND)
        ]

    def carrier(self, key: WorkerKey, piece: Slice, round: int) -> int:
        """The worker that sends and receives a slice for all.

        All carry alike; in deterministic mode it is the first one, so that the sums of hosts are
        added in the same order whatever the size of slices. What a codec keeps back of sums stays
        with one worker, so there it is the same one for all that a server keeps. In place of one
        that has left comes the next one in turn, so a worker that carries a slice of a round never
        ceases to.
        """
        adding = self.adding(key.key_id, round)
        ranks = self._all
        part = piece.server if key.codecs.gradients.remembers else piece.index
        turn = 0 if self._deterministic else (key.key_id + part) % len(ranks)
        if len(adding) == len(ranks):
            return ranks[turn]
        return next(rank for rank in ranks[turn:] + ranks[:turn] if rank in adding)


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


def nothing(error: Optional[BaseException]) -> None:
    """Ends a transfer for which only neighbours wait."""


def wants_result(transfer: Transfer) -> int:
    """The flag by which a push asks for its result, if it does."""
    return 0 if transfer.target is None else WANTS_RESULT


def _sum_id(transfer: Transfer, piece: Slice) -> _SumId:
    return transfer.key.key_id, transfer.round, piece.index
