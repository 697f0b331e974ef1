"""Sums of the rows that workers have touched, in one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Deque, Dict

import numpy as np

from p3kv.wire.rows import NUMBER, Rows


class RowSum:
    """A sum of rows: has memory for the rows that are in it, and not for the others."""

    def __init__(self, rows: int, row_elems: int, dtype: np.dtype) -> None:
        """Makes an empty sum for some of `rows` rows."""
        self._place = np.full(rows, -1, np.int64)
        """Where each row is in the sum; -1: it is not."""
        self._elements = np.empty((0, row_elems), dtype)
        self._count = 0

    def add(self, rows: Rows) -> None:
        """Adds rows, casting them to the sum's dtype; their memory is not used any more when it
        returns."""
        numbers, elements = rows
        places = self._place[numbers]
        new = places < 0
        if new.all():
            self._append(numbers, elements)
        elif new.any():
            self._add_to(places[~new], elements[~new])
            self._append(numbers[new], elements[new])
        else:
            self._add_to(places, elements)

    def between(self, first: int, end: int) -> Rows:
        """The rows with numbers from `first` to before `end`, in ascending order."""
        places = self._place[first:end]
        numbers = np.flatnonzero(places >= 0)
        places = places[numbers]
        if len(places) and (np.diff(places) == 1).all():
            elements = self._elements[places[0] : places[0] + len(places)]
        else:
            elements = self._elements[places]
        return Rows((numbers + first).astype(NUMBER), elements)

    def _append(self, numbers: np.ndarray, elements: np.ndarray) -> None:
        end = self._count + len(numbers)
        if end > len(self._elements):
            larger = min(len(self._place), max(end, 2 * len(self._elements)))
            grown = np.empty((larger, elements.shape[1]), self._elements.dtype)
            grown[: self._count] = self._elements[: self._count]
            self._elements = grown
        self._elements[self._count : end] = elements
        self._place[numbers] = np.arange(self._count, end)
        self._count = end

    def _add_to(self, places: np.ndarray, elements: np.ndarray) -> None:
        if (np.diff(places) == 1).all():
            # Usual where workers touch all rows: nothing is copied then.
            part = self._elements[places[0] : places[0] + len(places)]
            np.add(part, elements, out=part)
        else:
            self._elements[places] += elements


def _add_until(total: RowSum, arrived: Deque[Rows], end: int) -> None:
    """Moves the rows before `end` from `arrived`, which ascend, to a sum."""
    while arrived:
        numbers, elements = arrived.popleft()
        count = int(numbers.searchsorted(end))
        total.add(Rows(numbers[:count], elements[:count]))
        if count < len(numbers):
            arrived.appendleft(Rows(numbers[count:], elements[count:]))
            return


class PushOfRows:
    """A worker's push of which some frames have arrived."""

    def __init__(self, frames: int, workers: int) -> None:
        """`workers`: of how many of a host it is the sum; 0: of its own rows."""
        self.frames = self.missing = frames
        self.workers = workers
        self.next_row = 0
        """Rows from this one on may still come."""


class RowsOfRound(ABC):
    """Pushes of a key's rows that have arrived in one round."""

    def __init__(self) -> None:
        self.pushes: Dict[int, PushOfRows] = {}
        """By rank."""
        self.empty = True
        """Whether no worker has pushed a gradient, be it without rows."""
        self.updated_rows = 0
        """Rows before this one have changed the value already."""

    @abstractmethod
    def add(self, rank: int, rows: Rows) -> None:
        """Adds some of a worker's rows, which come in ascending order, and owns their memory."""

    @abstractmethod
    def between(self, first: int, end: int) -> Rows:
        """The sum's rows with numbers from `first` to before `end`, once all of them have come; all
        before `first` have been asked for."""


class RunningRows(RowsOfRound):
    """Adds in the order of arrival."""

    def __init__(self, total: RowSum) -> None:
        super().__init__()
        self._total = total

    def add(self, rank: int, rows: Rows) -> None:
        self._total.add(rows)

    def between(self, first: int, end: int) -> Rows:
        return self._total.between(first, end)


class OrderedRows(RowsOfRound):
    """Adds in the order of ranks: bit for bit the same each time."""

    def __init__(self, total: RowSum) -> None:
        super().__init__()
        self._total = total
        self._by_rank: Dict[int, Deque[Rows]] = {}
        """Rows that are not in `total`."""

    def add(self, rank: int, rows: Rows) -> None:
        self._by_rank.setdefault(rank, deque()).append(rows)

    def between(self, first: int, end: int) -> Rows:
        for rank in sorted(self._by_rank):
            _add_until(self._total, self._by_rank[rank], end)
        return self._total.between(first, end)
