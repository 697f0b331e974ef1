"""Rows of a tensor as they travel: their numbers, and then their elements.

A number has 32 bits and counts the rows of a server's run. A frame has as many whole rows as a
slice has room for, in ascending order; a frame without rows says that there are none. Where a codec
has encoded the elements, their bytes do not tell how many rows there are, and this number of 32
bits comes first.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Optional, Sequence, Union

import numpy as np

from p3kv.errors import ProtocolError

NUMBER = np.dtype("<u4")

_LARGE_BYTES = 1 << 20
"""Of the rows in a large frame: a server adds up some while others are on their way."""

Encode = Callable[[np.ndarray, memoryview], int]
"""Writes elements into memory as they travel; returns how many bytes they have."""
Decode = Callable[[memoryview, np.ndarray], None]
"""Writes elements that have travelled so into an array; ProtocolError for wrong ones."""


class Rows(NamedTuple):
    """Some rows of a run."""

    numbers: np.ndarray
    """Ascending, of NUMBER's dtype."""
    elements: np.ndarray
    """By row, two-dimensional."""

    def copied(self) -> memoryview:
        """The payload of a frame that has these rows."""
        payload = memory(self.numbers.nbytes + self.elements.nbytes)
        to = unpacked(payload, self.elements.dtype, self.elements.shape[1])
        to.numbers[:] = self.numbers
        to.elements[:] = self.elements
        return payload

    def encoded(self, most_bytes: int, encode: Encode) -> memoryview:
        """The payload of a frame that has these rows encoded; `most_bytes` that the elements may
        have then."""
        count = len(self.numbers)
        head = (1 + count) * NUMBER.itemsize
        payload = memory(head + most_bytes if count else 0)
        if not count:
            return payload
        words = np.frombuffer(payload, NUMBER, 1 + count)
        words[0], words[1:] = count, self.numbers
        return payload[: head + encode(self.elements.reshape(-1), payload[head:])]


def gathered(
    numbers: np.ndarray, run: np.ndarray, places: Optional[np.ndarray] = None
) -> memoryview:
    """The payload of a frame that has the rows with these numbers, which are at as many places of
    `run`; None: of all rows."""
    payload = memory(numbers.nbytes + len(numbers) * run[:1].nbytes)
    to = unpacked(payload, run.dtype, run.shape[1])
    to.numbers[:] = numbers
    some = index_of(numbers if places is None else places)
    if isinstance(some, slice):
        to.elements[:] = run[some]
    else:
        np.take(run, some, axis=0, out=to.elements, mode="clip")  # any other mode copies twice
    return payload


def memory(size_bytes: int) -> memoryview:
    """So many bytes, not initialised."""
    return np.empty(size_bytes, np.uint8).data


def index_of(numbers: np.ndarray) -> Union[np.ndarray, slice]:
    """Selects rows whose numbers ascend: by a slice where they follow each other, which is faster
    and copies nothing."""
    if len(numbers) and int(numbers[-1]) - int(numbers[0]) + 1 == len(numbers):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def union(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """All numbers that are in any of these arrays, each of which ascends; they do, too."""
    longest = max(numbers, key=len)
    several = [one for one in numbers if len(one)]
    if len(several) < 2:
        return longest
    least, most = min(one[0] for one in several), max(one[-1] for one in several)
    if int(most) - int(least) + 1 == len(longest):
        return longest  # it has all that there are
    merged = np.concatenate(several)
    merged.sort(kind="stable")  # which merges what ascends
    new = np.ones(len(merged), np.bool_)
    np.not_equal(merged[1:], merged[:-1], out=new[1:])
    return merged[new]


def summed(numbers: np.ndarray, parts: Sequence[Rows], dtype: np.dtype) -> Rows:
    """The sum of the rows with these numbers, in the order of the parts; at least one has each.

    Where there is one part, the sum may be a view of it.
    """
    if len(parts) == 1 and len(parts[0].numbers) == len(numbers):
        return Rows(numbers, parts[0].elements.astype(dtype, copy=False))
    total = np.empty((len(numbers), parts[0].elements.shape[1]), dtype)
    lacks = np.ones(len(numbers), np.bool_)
    """Rows of which nothing is in the total."""
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts if len(numbers) else ():
            some, elements = _between(part, numbers[0], numbers[-1])
            if len(some):
                _add(total, lacks, _places(numbers, some), elements)
    return Rows(numbers, total)


def _between(part: Rows, least: int, most: int) -> Rows:
    numbers, elements = part
    if len(numbers) and (numbers[0] < least or numbers[-1] > most):
        some = slice(numbers.searchsorted(least), numbers.searchsorted(most, "right"))
        return Rows(numbers[some], elements[some])
    return part


def _places(numbers: np.ndarray, some: np.ndarray) -> Union[np.ndarray, slice]:
    """Where some of the numbers are among them."""
    if isinstance(index_of(some), slice):
        start = int(numbers.searchsorted(some[0]))
        return slice(start, start + len(some))
    return numbers.searchsorted(some)


def _add(
    total: np.ndarray, lacks: np.ndarray, places: Union[np.ndarray, slice], elements: np.ndarray
) -> None:
    new = lacks[places]
    if new.all():
        total[places] = elements
    elif not new.any():
        total[places] += elements
    else:
        every = np.arange(places.start, places.stop) if isinstance(places, slice) else places
        total[every[new]] = elements[new]
        total[every[~new]] += elements[~new]
    lacks[places] = False


def unpacked(payload: memoryview, dtype: np.dtype, row_elems: int) -> Rows:
    """A payload's rows, as views of it; the size must be right."""
    if not len(payload):
        return Rows(np.empty(0, NUMBER), np.empty((0, row_elems), dtype))
    count = len(payload) // (NUMBER.itemsize + row_elems * dtype.itemsize)
    numbers = np.frombuffer(payload, NUMBER, count)
    elements = np.frombuffer(payload, dtype, count * row_elems, count * NUMBER.itemsize)
    return Rows(numbers, elements.reshape(count, row_elems))


def decoded(
    payload: memoryview, dtype: np.dtype, row_elems: int, most_rows: int, decode: Decode
) -> Rows:
    """The rows of a payload that has them encoded, with elements of their own.

    Raises ProtocolError for what can't be some of `most_rows` rows.
    """
    if not len(payload):
        return unpacked(payload, dtype, row_elems)
    count = int(np.frombuffer(payload, NUMBER, 1)[0]) if len(payload) >= NUMBER.itemsize else 0
    head = (1 + count) * NUMBER.itemsize
    if not 0 < count <= most_rows or head > len(payload):
        raise ProtocolError(f"it sent {len(payload)} bytes for {count} encoded rows of {most_rows}")
    elements = np.empty(count * row_elems, dtype)
    decode(payload[head:], elements)
    numbers = np.frombuffer(payload, NUMBER, count, NUMBER.itemsize)
    return Rows(numbers, elements.reshape(count, row_elems))


def check_encoded_size(payload_bytes: int, most_bytes: int, most_rows: int) -> None:
    """Raises ProtocolError for a payload that can't be some of `most_rows` encoded rows, whose
    elements have `most_bytes` at most, or none if they are not to be encoded; before it is
    received."""
    most = most_bytes + (1 + most_rows) * NUMBER.itemsize
    if not most_bytes or payload_bytes > most:
        raise ProtocolError(
            f"it sent {payload_bytes} bytes for some of {most_rows} encoded rows, for which at "
            f"most {most if most_bytes else 0} are right"
        )


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


def pieces(rows: int, slice_rows: int, row_bytes: int, priority: int) -> Iterator[slice]:
    """Cuts so many rows into frames, at least one, which may have none.

    A frame has `slice_rows` at most, so that more urgent ones soon have their turn. No frame of a
    step is more urgent than those of its first key, or of any if there are no priorities: these
    frames are large, since each takes processor time.
    """
    most = slice_rows if priority < 0 else max(slice_rows, _LARGE_BYTES // row_bytes)
    for start in range(0, max(1, rows), most):
        yield slice(start, min(start + most, rows))
