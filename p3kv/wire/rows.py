"""Rows of a tensor as they travel: their elements, and what tells their numbers.

A number counts the rows of a server's run, or of a request, and ascends within a frame. The header
has the first one and how many there are, so rows that follow each other need nothing else. Of
others, each but the first has its distance from the one before, behind all elements, in as few
bytes as the largest distance of the frame needs. A frame without rows says that there are none.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Optional, Protocol, Sequence, Union

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.wire.fields import PushRowsHeader, RowsHeader
from p3kv.wire.framing import Pieces
from p3kv.wire.header import ENCODED, GAPS, ONE_BYTE, TWO_BYTES

NUMBER = np.dtype("<u4")
_GAPS = {0: None, ONE_BYTE: np.dtype("<u1"), TWO_BYTES: np.dtype("<u2"), GAPS: NUMBER}
_NO_GAPS = np.empty(0, np.uint8)
_LAST = 2**32 - 1

_LARGE_BYTES = 1 << 20
"""Of the rows in a large frame: a server adds up some while others are on their way."""


class Encodes(Protocol):
    """An encoder of `p3kv.codecs`, and what it calls a part."""

    def encode(self, elements: np.ndarray, part: Any, out: memoryview) -> int: ...


class Decodes(Protocol):
    """A decoder of `p3kv.codecs`."""

    def decode(self, payload: memoryview, part: Any, out: np.ndarray) -> None: ...


class Rows(NamedTuple):
    """Some rows of a run."""

    numbers: np.ndarray
    """Ascending, of NUMBER's dtype."""
    elements: np.ndarray
    """By row, two-dimensional."""

    def in_place(self, gaps: np.ndarray) -> Pieces:
        """The payload of a frame that has these rows, with such gaps; it is in their memory."""
        elements = np.ascontiguousarray(self.elements).reshape(-1)
        return elements.view(np.uint8).data, gaps.view(np.uint8).data

    def encoded(self, gaps: np.ndarray, encoder: Encodes, part: Any, most_bytes: int) -> memoryview:
        """The payload of a frame that has these rows encoded; `most_bytes` that the elements may
        have then."""
        if not len(self.numbers):
            return memory(0)
        payload = memory(most_bytes + gaps.nbytes)
        size = encoder.encode(self.elements.reshape(-1), part, payload[:most_bytes])
        payload[size : size + gaps.nbytes] = gaps.view(np.uint8).data
        return payload[: size + gaps.nbytes]


class Packed(NamedTuple):
    """Numbers of a frame's rows as they travel: the fields of its header, and what is behind the
    elements."""

    first: int
    rows: int
    flags: int
    gaps: np.ndarray


def packed(numbers: np.ndarray) -> Packed:
    """Ascending numbers as they travel."""
    count = len(numbers)
    if count == 0 or int(numbers[-1]) - int(numbers[0]) + 1 == count:
        return Packed(int(numbers[0]) if count else 0, count, 0, _NO_GAPS)
    gaps = np.diff(numbers)
    most = int(gaps.max())
    flags = ONE_BYTE if most < 1 << 8 else TWO_BYTES if most < 1 << 16 else GAPS
    return Packed(int(numbers[0]), count, flags, gaps.astype(_GAPS[flags]))


def gathered(run: np.ndarray, some: Union[np.ndarray, slice], gaps: np.ndarray) -> memoryview:
    """The payload of a frame that has some rows of a run, with such gaps."""
    rows = len(some) if isinstance(some, np.ndarray) else len(run[some])
    size = rows * run.shape[1] * run.itemsize
    payload = memory(size + gaps.nbytes)
    elements = payload_elements(payload, run.dtype, rows, run.shape[1])
    if isinstance(some, slice):
        elements[:] = run[some]
    else:
        np.take(run, some, axis=0, out=elements, mode="clip")  # any other mode copies twice
    payload[size:] = gaps.view(np.uint8).data
    return payload


def payload_elements(payload: memoryview, dtype: np.dtype, rows: int, row_elems: int) -> np.ndarray:
    """A frame's elements by row, as a view of its payload."""
    if not rows:
        return np.empty((0, row_elems), dtype)
    return np.frombuffer(payload, dtype, rows * row_elems).reshape(rows, row_elems)


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
    """Union of ascending arrays of numbers: ascending, each once."""
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
    Where there is one part, the sum may be a view of it."""
    if len(parts) == 1 and len(parts[0].numbers) == len(numbers):
        return Rows(numbers, parts[0].elements.astype(dtype, copy=False))
    total = np.empty((len(numbers), parts[0].elements.shape[1]), dtype)
    lacks = np.ones(len(numbers), np.bool_)
    """Rows to which no part is added yet."""
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
        others = every[~new]
        before = total[others]
        total[places] = elements
        total[others] += before
    lacks[places] = False


RowsFrame = Union[PushRowsHeader, RowsHeader]


def check_frame(header: RowsFrame, most_rows: int, row_bytes: int, most_bytes: int = -1) -> None:
    """Raises ProtocolError for a frame that can't have some of `most_rows` rows, before it is
    received. `most_bytes`: most that their elements may have encoded, 0 if they are not to be."""
    size_bytes = header.payload_bytes - _gaps_bytes(header)
    if not header.rows:
        fits = header.payload_bytes == 0
    elif most_bytes < 0:
        fits = size_bytes == header.rows * row_bytes
    else:
        fits = most_bytes > 0 and 0 <= size_bytes <= most_bytes
    if not fits or header.first + header.rows > most_rows:
        encoded = "" if most_bytes < 0 else f", encoded in {most_bytes} at most"
        raise ProtocolError(
            f"it sent {header.payload_bytes} bytes for {header.rows} rows from {header.first} on, "
            f"of {most_rows} rows of {row_bytes} bytes each{encoded}"
        )


def unpacked(
    header: RowsFrame,
    payload: memoryview,
    dtype: np.dtype,
    row_elems: int,
    decoder: Optional[Decodes] = None,
    part: Any = None,
) -> Rows:
    """The rows of a frame that has passed `check_frame`: their elements are a view of the payload,
    or what the decoder makes of it. Raises ProtocolError where numbers do not ascend, and for
    elements that can't be decoded."""
    rows, start = header.rows, header.payload_bytes - _gaps_bytes(header)
    if decoder is not None and rows and header.flags & ENCODED:
        elements = np.empty((rows, row_elems), dtype)
        decoder.decode(payload[:start], part, elements.reshape(-1))
    else:
        elements = payload_elements(payload, dtype, rows, row_elems)
    return Rows(_numbers(header, payload[start:]), elements)


def _numbers(header: RowsFrame, gaps: memoryview) -> np.ndarray:
    dtype = _GAPS[header.flags & GAPS]
    if dtype is None:
        return np.arange(header.first, header.first + header.rows, dtype=NUMBER)
    numbers = np.full(header.rows, header.first, np.int64)
    distances = np.frombuffer(gaps, dtype)
    numbers[1:] += np.cumsum(distances, dtype=np.int64)
    if not distances.all() or (header.rows and numbers[-1] > _LAST):
        raise ProtocolError("it sent rows that are not in ascending order")
    return numbers.astype(NUMBER)


def _gaps_bytes(header: RowsFrame) -> int:
    dtype = _GAPS[header.flags & GAPS]
    return 0 if dtype is None else max(0, header.rows - 1) * dtype.itemsize


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
