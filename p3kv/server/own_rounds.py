"""Rounds that are each worker's own: a push updates the value by itself, in its worker's order."""

from __future__ import annotations

from typing import Dict, Generic, Iterator, Tuple, TypeVar

from p3kv.wire.header import INITIAL_ROUND

T = TypeVar("T")


class OwnRounds(Generic[T]):
    """One slice's rounds by worker: which have ended, and what has come of others.

    A push waits here for the rounds before it of the same worker, for the initial value, and for
    the optimizer; where the optimizer needs whole tensors, also for the key's other slices. It
    never waits for another worker's push. Belongs to the server's thread.
    """

    def __init__(self) -> None:
        self._ended: Dict[int, int] = {}
        self._waiting: Dict[Tuple[int, int], T] = {}
        """By rank and round."""

    def ended(self, rank: int) -> int:
        """The last round of a worker that has ended."""
        return self._ended.get(rank, INITIAL_ROUND)

    def has_come(self, rank: int, round: int) -> bool:
        """Whether a worker has pushed for a round."""
        return round <= self.ended(rank) or (rank, round) in self._waiting

    def add(self, rank: int, round: int, came: T) -> None:
        """Keeps what has come of a round until `end` takes it."""
        self._waiting[rank, round] = came

    def next(self) -> Iterator[Tuple[int, int]]:
        """The rounds that may end next, by rank and round."""
        return (one for one in list(self._waiting) if one[1] == self.ended(one[0]) + 1)

    def is_next(self, rank: int, round: int) -> bool:
        """Whether a worker's round has come and is the next of its rounds."""
        return (rank, round) in self._waiting and round == self.ended(rank) + 1

    def end(self, rank: int, round: int) -> T:
        """Counts a worker's next round as ended, and returns what has come of it."""
        self._ended[rank] = round
        return self._waiting.pop((rank, round))

    def waiting(self) -> Iterator[Tuple[int, int, T]]:
        """What waits, by rank and round."""
        return ((rank, round_, came) for (rank, round_), came in self._waiting.items())
