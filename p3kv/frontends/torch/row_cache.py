"""Rows of a table that a worker keeps, with the round since which it knows each."""

from __future__ import annotations

from typing import Tuple

import numpy as np


class RowCache:
    """The rows that were used last; those that were not used for longest make room for others.

    A row that is here has changed on its server or not since it came: the worker asks for it with
    the round of which it has the value, and gets it if it has changed. To be used from one thread.
    """

    def __init__(self, most_rows: int, row_elems: int, dtype: np.dtype) -> None:
        self._most = most_rows
        self._elements = np.empty((most_rows, row_elems), dtype)
        """By slot, as the next two."""
        self._rounds = np.empty(most_rows, np.int64)
        self._used = np.empty(most_rows, np.int64)
        """When each was used last, in calls of `keep`."""
        self._numbers = np.empty(0, np.int64)
        """Of all rows that are here, ascending."""
        self._slots = np.empty(0, np.int64)
        """Theirs."""
        self._now = 0
        self.evictions = 0

    def copy(self, numbers: np.ndarray, into: np.ndarray, rounds: np.ndarray) -> None:
        """Copies the rows with these numbers that are here `into` their places, and the rounds of
        which they are; other places stay as they are."""
        here, slots = self._find(numbers)
        into[here], rounds[here] = self._elements[slots], self._rounds[slots]

    def keep(self, numbers: np.ndarray, elements: np.ndarray, rounds: np.ndarray) -> None:
        """Keeps rows, which were used now, as far as there is room; their numbers ascend."""
        self._now += 1
        here, slots = self._find(numbers)
        self._used[slots] = self._now
        newer = rounds[here] > self._rounds[slots]
        places = np.flatnonzero(here)[newer]
        self._fill(slots[newer], elements[places], rounds[places])
        new = np.flatnonzero(~here)[: self._most - len(slots)]
        slots = self._free(len(new))
        self._fill(slots, elements[new], rounds[new])
        self._used[slots] = self._now
        at = self._numbers.searchsorted(numbers[new])
        self._numbers = np.insert(self._numbers, at, numbers[new])
        self._slots = np.insert(self._slots, at, slots)

    def _find(self, numbers: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Which rows are here, and the slots of these."""
        if not len(self._numbers):
            return np.zeros(len(numbers), bool), np.empty(0, np.int64)
        at = np.minimum(self._numbers.searchsorted(numbers), len(self._numbers) - 1)
        here = self._numbers[at] == numbers
        return here, self._slots[at[here]]

    def _fill(self, slots: np.ndarray, elements: np.ndarray, rounds: np.ndarray) -> None:
        self._elements[slots], self._rounds[slots] = elements, rounds

    def _free(self, count: int) -> np.ndarray:
        """So many slots, of rows that were not used now."""
        used = len(self._numbers)
        unused = np.arange(used, min(self._most, used + count))
        evicted = count - len(unused)
        if not evicted:
            return unused
        self.evictions += evicted
        oldest = np.argpartition(self._used[:used], evicted - 1)[:evicted]
        gone = np.zeros(self._most, bool)
        gone[oldest] = True
        stays = ~gone[self._slots]
        self._numbers, self._slots = self._numbers[stays], self._slots[stays]
        return np.concatenate([unused, oldest])
