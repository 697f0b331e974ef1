"""Rows of a tensor as they travel: their numbers, and then their elements.

A number has 32 bits and counts the rows of a server's run. A frame has as many whole rows as a
slice has room for, in ascending order; a frame without rows says that there are none.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

import numpy as np

from p3kv.errors import ProtocolError

NUMBER = np.dtype("<u4")


class Rows(NamedTuple):
    """Some rows of a run."""

    numbers: np.ndarray
    """Ascending, of NUMBER's dtype."""
    elements: np.ndarray
    """By row, two-dimensional."""

    def copied(self) -> memoryview:
        """The payload of a frame that has these rows."""
        payload = bytearray(self.numbers.nbytes + self.elements.nbytes)
        to = unpacked(memoryview(payload), self.elements.dtype, self.elements.shape[1])
        to.numbers[:] = self.numbers
        to.elements[:] = self.elements
        return memoryview(payload)


def unpacked(payload: memoryview, dtype: np.dtype, row_elems: int) -> Rows:
    """A payload's rows, as views of it; the size must be right."""
    if not len(payload):
        return Rows(np.empty(0, NUMBER), np.empty((0, row_elems), dtype))
    count = len(payload) // (NUMBER.itemsize + row_elems * dtype.itemsize)
    numbers = np.frombuffer(payload, NUMBER, count)
    elements = np.frombuffer(payload, dtype, count * row_elems, count * NUMBER.itemsize)
    return Rows(numbers, elements.reshape(count, row_elems))


def check_size(payload_bytes: int, row_bytes: int, most_rows: int) -> None:
    """Raises ProtocolError for a payload that can't be some of `most_rows` rows, before it is
    received."""
    count, rest = divmod(payload_bytes, NUMBER.itemsize + row_bytes)
    if rest or count > most_rows:
        raise ProtocolError(
            f"it sent {payload_bytes} bytes for some of {most_rows} rows of {row_bytes} bytes each"
        )


def check_numbers(numbers: np.ndarray, first: int, rows: int) -> None:
    """Raises ProtocolError unless these are numbers from `first` on, ascending, of `rows` rows."""
    if not len(numbers):
        return
    ascending = bool((numbers[1:] > numbers[:-1]).all())
    if not ascending or numbers[0] < first or numbers[-1] >= rows:
        raise ProtocolError(
            f"it sent rows that are not in ascending order from {first} to {rows - 1}"
        )


def pieces(rows: int, most: int) -> Iterator[slice]:
    """Cuts so many rows into frames of at most `most`, at least one, which may have none."""
    for start in range(0, max(1, rows), most):
        yield slice(start, min(start + most, rows))
