"""Sums of the rows that workers have touched, in one round."""

from __future__ import annotations

from itertools import takewhile
from typing import Dict, List, Sequence

import numpy as np

from p3kv.wire.rows import NUMBER, Rows, summed, union

_FOLDED = -1
"""The rank of a sum, beside those of the workers whose rows are not in it: it comes first."""
_MOST_RUNS = 2
"""How often all rows of the run may be kept before they are added up, in any order."""


class PushOfRows:
    """A worker's push of which some frames have arrived."""

    def __init__(self, frames: int, workers: int) -> None:
        """`workers`: of how many of a host it is the sum; 0: of its own rows."""
        self.frames = self.missing = frames
        self.workers = workers
        self.next_row = 0
        """Rows from this one on may still come."""


class RowsOfRound:
    """Pushes of a key's rows that have arrived in one round.

    Rows stay where they have arrived until their sum is asked for, and are then added up in the
    order of ranks: bit for bit the same each time. If ranks need no order, memory has a limit: they
    are added up earlier where many workers push most rows of a run.
    """

    def __init__(self, run_rows: int, row_elems: int, dtype: np.dtype, ordered: bool) -> None:
        """`run_rows`: how many rows the run has; `dtype`: the sum's."""
        self.pushes: Dict[int, PushOfRows] = {}
        """By rank."""
        self.empty = True
        """Whether no worker has pushed a gradient, be it without rows."""
        self.updated_rows = 0
        """Rows before this one have changed the value already."""
        self._none = Rows(np.empty(0, NUMBER), np.empty((0, row_elems), dtype))
        self._most_rows = _MOST_RUNS * run_rows
        self._ordered = ordered
        self._by_rank: Dict[int, List[Rows]] = {}
        """What has arrived, and is not summed; of each rank in ascending order."""
        self._rows = 0
        """How many rows these are."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the rows that have arrived and are not taken."""
        return self._rows * self._none.elements.shape[1] * self._none.elements.itemsize

    def add(self, rank: int, rows: Rows) -> None:
        """Adds some of a worker's rows, which come in ascending order, and owns their memory."""
        self._by_rank.setdefault(rank, []).append(rows)
        self._rows += len(rows.numbers)
        if self._rows > self._most_rows and not self._ordered:
            self.total()

    def total(self) -> Rows:
        """The sum of all that has arrived and has not been taken."""
        total = self._sum([rows for rank in sorted(self._by_rank) for rows in self._by_rank[rank]])
        self._by_rank = {_FOLDED: [total]}
        self._rows = len(total.numbers)
        return total

    def take(self, end: int) -> Rows:
        """Takes the sum's rows before `end`, in ascending order, once all of them have come."""
        taken: List[Rows] = []
        for rank in sorted(self._by_rank):
            taken += _taken(self._by_rank[rank], end)
        self._rows -= sum(len(rows.numbers) for rows in taken)
        return self._sum(taken)

    def _sum(self, several: Sequence[Rows]) -> Rows:
        parts = [rows for rows in several if len(rows.numbers)]
        if not parts:
            return self._none
        return summed(union([rows.numbers for rows in parts]), parts, self._none.elements.dtype)


def _taken(arrived: List[Rows], end: int) -> List[Rows]:
    """Removes the rows before `end` from what has arrived, which ascends."""
    whole = (not len(numbers) or numbers[-1] < end for numbers, _ in arrived)
    count = sum(takewhile(bool, whole))
    taken = arrived[:count]
    del arrived[:count]
    if arrived and arrived[0].numbers[0] < end:
        numbers, elements = arrived[0]
        before = int(numbers.searchsorted(end))
        taken.append(Rows(numbers[:before], elements[:before]))
        arrived[0] = Rows(numbers[before:], elements[before:])
    return taken
