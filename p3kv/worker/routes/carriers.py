"""Workers of a host that add to a sum, and the one of them that carries it."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.transfers import WorkerKey


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

    @property
    def first(self) -> bool:
        """Whether there are neighbours, and all have higher ranks than this worker."""
        return bool(self._neighbours) and self._rank < min(self._neighbours)

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
