"""Positions of some elements of a slice, in as few bytes as they take."""

from __future__ import annotations

import struct
from typing import Dict, Tuple

import numpy as np

from p3kv.errors import ProtocolError

_END = struct.Struct("<BI")
"""The form, and how many positions there are; behind them."""
_BITMAP, _GAPS_8, _GAPS_16, _NUMBERS = range(4)
_GAPS: Dict[int, np.dtype] = {_GAPS_8: np.dtype("<u1"), _GAPS_16: np.dtype("<u2")}
_NUMBER = np.dtype("<u4")


def most_bytes(length_elems: int, count: int) -> int:
    """The most bytes that `count` positions in a slice of so many elements take: a bit for each
    element, or a number for each position."""
    return min(-(-length_elems // 8), count * _NUMBER.itemsize) + _END.size


def write(positions: np.ndarray, length_elems: int) -> bytes:
    """Writes positions, in ascending order, in the form that takes the least bytes: one bit for
    each element of the slice; or how many elements lie between two positions, in 8 or 16 bits; or
    the positions in 32 bits."""
    count = len(positions)
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = {_BITMAP: -(-length_elems // 8), _NUMBERS: count * _NUMBER.itemsize}
    for form, dtype in _GAPS.items():
        sizes[form] = (count + int(np.sum(gaps // _most(dtype)))) * dtype.itemsize
    form = min(sizes, key=lambda one: sizes[one])
    if form == _BITMAP:
        bits = np.zeros(length_elems, bool)
        bits[positions] = True
        written = np.packbits(bits).tobytes()
    elif form == _NUMBERS:
        written = positions.astype(_NUMBER).tobytes()
    else:
        written = _written_gaps(gaps, _GAPS[form])
    return written + _END.pack(form, count)


def read(payload: memoryview, length_elems: int, item_bytes: int) -> Tuple[np.ndarray, memoryview]:
    """Reads positions that stand behind as many items in a payload; returns both. ProtocolError
    for what `write` does not write."""
    if len(payload) < _END.size:
        raise _wrong(payload, length_elems)
    form, count = _END.unpack(payload[-_END.size :])
    items_bytes = count * item_bytes
    written = payload[items_bytes : -_END.size]
    if count > length_elems or items_bytes > len(payload) - _END.size:
        raise _wrong(payload, length_elems)
    if form == _BITMAP and len(written) == -(-length_elems // 8):
        bits = np.unpackbits(np.frombuffer(written, np.uint8))
        positions = np.flatnonzero(bits)
    elif form == _NUMBERS and len(written) == count * _NUMBER.itemsize:
        positions = np.frombuffer(written, _NUMBER).astype(np.int64)
        if np.any(np.diff(positions) < 1):
            raise _wrong(payload, length_elems)
    elif form in _GAPS and len(written) % _GAPS[form].itemsize == 0:
        numbers = np.frombuffer(written, _GAPS[form])
        if len(numbers) and numbers[-1] == _most(numbers.dtype):
            raise _wrong(payload, length_elems)  # a gap that does not end
        positions = _read_gaps(numbers)
    else:
        raise _wrong(payload, length_elems)
    if len(positions) != count or (count and positions[-1] >= length_elems):
        raise _wrong(payload, length_elems)
    return positions, payload[:items_bytes]


def _most(dtype: np.dtype) -> int:
    """The gap that says: so many elements, and then the next gap."""
    return int(np.iinfo(dtype).max)


def _written_gaps(gaps: np.ndarray, dtype: np.dtype) -> bytes:
    most = _most(dtype)
    ends = np.cumsum(gaps // most + 1)
    numbers = np.full(ends[-1] if len(ends) else 0, most, dtype)
    numbers[ends - 1] = gaps % most
    return numbers.tobytes()


def _read_gaps(numbers: np.ndarray) -> np.ndarray:
    most = _most(numbers.dtype)
    is_last = numbers != most
    # An element itself comes behind each gap that is complete.
    behind: np.ndarray = np.cumsum(numbers + is_last.astype(np.int64))
    return behind[is_last] - 1


def _wrong(payload: memoryview, length_elems: int) -> ProtocolError:
    return ProtocolError(
        f"it sent {len(payload)} bytes that are not some of {length_elems} elements and their "
        "positions"
    )
