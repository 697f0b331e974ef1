"""Dense keys whose gradients have mostly zero rows, such as embeddings': these rows do not travel,
and of values only those that the round has changed, to workers that have the value before.

Exact: a row is left out if all its bits are zero, or as before, so -0.0 and nan travel. Each frame
says how it is packed, so a sender decides alone and may change its mind at any round.
"""

from __future__ import annotations

import logging
import math
import statistics
import struct
from typing import Callable, NamedTuple, Sequence, Tuple

import numpy as np

from p3kv.codecs.codec import Codec, Encoder, Part
from p3kv.errors import ProtocolError

_log = logging.getLogger(__name__)
LEAST_BYTES = 32 * 1024
"""A smaller key travels whole: a look at each of its gradients costs more than its bytes."""
_TAIL = struct.Struct("<II")
"""Bytes of a row, 0 where none is left out; and bytes before the first whole row."""
TAIL_BYTES = _TAIL.size
_BLOCK_ELEMS = 128
"""What counts as a row of a key whose own rows are shorter or longer than pays."""
_SHORTEST_ELEMS, _LONGEST_ELEMS = 8, 4096
_SAMPLED = 64
"""Rows of a slice at which the sender looks before it decides."""
_FIRST_ROUNDS = 3
_LOOK_EVERY = 64
"""Rounds between two looks at a key that travels whole."""


class Costs(NamedTuple):
    """Processor time, in seconds: of NumPy and of TCP on one host, on both sides together."""

    travels_s: float = 0.3e-9
    """To send and receive a byte over a link that is never full."""
    looks_s: float = 0.12e-9
    """To find out whether a byte is zero, and to write the zero where it arrives."""
    row_s: float = 15e-9
    """The same for each row."""
    copies_s: float = 0.1e-9
    """To gather a byte that travels, and to scatter it again."""

    def pays_from(self, row_bytes: int, link_s: float) -> float:
        """Share of rows from which leaving them out takes less time, on a link that takes so many
        seconds for a byte."""
        looks_s = self.looks_s + self.row_s / row_bytes
        return (looks_s + self.copies_s) / (self.travels_s + link_s + self.copies_s)


COSTS = Costs()


class ZeroRows(Encoder):
    """Decides by rounds whether a dense key's slices travel without rows, and packs them: of
    gradients those that are zero, of values those that have not changed. Belongs to the thread of
    its worker or server."""

    def __init__(
        self,
        codec: Codec,
        shape: Sequence[int],
        link_s: Callable[[], float],
        what: str,
    ) -> None:
        """`link_s()`: seconds that the link takes for a byte, as far as is known. `what` travels,
        for the log."""
        super().__init__(codec)
        self._what = what
        self._row_elems = row_elems(shape)
        self._link_s = link_s
        self._shares: Tuple[float, ...] = ()
        """Of the last rounds that were looked at, which share of the rows need not travel."""
        self._round = 0
        self._rounds = 0
        self._looks = False
        self._rows = self._zero = 0
        """How many rows of this round were seen, and how many of them need not travel."""
        self.leaves_out = False

    def left_out(self, round: int, parts: Sequence[np.ndarray], offset: int) -> bool:
        """Whether a slice of a round travels without its zero rows; it is the sum of `parts`."""
        if self.looks(round) and not self.leaves_out:
            bits = _bits(parts[0], offset, self._row_elems)[1]
            step = max(1, len(bits) // _SAMPLED)
            some = _nonzero(bits[::step])
            for part in parts[1:]:
                some |= _nonzero(_bits(part, offset, self._row_elems)[1][::step])
            self._count(some)
        return self.leaves_out

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        start, bits, end = _bits(elements, part.offset, self._row_elems)
        some = _nonzero(bits)
        self._count(some)
        return _pack(elements.view(np.uint8), bits, some, start, end, out)

    def encode_changes(
        self, before: np.ndarray, elements: np.ndarray, part: Part, out: memoryview
    ) -> int:
        """Like `encode`, the rows of a slice that are not as before; nothing (0) in a round in
        which it was only to look."""
        start, bits, end = _bits(elements, part.offset, self._row_elems)
        some = _nonzero(bits ^ _bits(before, part.offset, self._row_elems)[1])
        self._count(some)
        if not self.leaves_out:
            return 0
        return _pack(elements.view(np.uint8), bits, some, start, end, out)

    def looks(self, round: int) -> bool:
        """Whether slices of a round are to be looked at, since rows are left out or might be."""
        if round > self._round:
            self._begin(round)
        return self._looks or self.leaves_out

    @property
    def why(self) -> str:
        """Which way gradients travel at present and why, for people."""
        if not self._shares:
            return "whole: no round has been looked at"
        share, least = statistics.median(self._shares), self._pays_from
        way = "by rows" if self.leaves_out else "whole"
        return f"{way}: {share:.0%} of the rows need not travel, and it pays from {least:.0%} on"

    @property
    def _pays_from(self) -> float:
        return COSTS.pays_from(self._row_elems * self.codec.dtype.itemsize, self._link_s())

    def _begin(self, round: int) -> None:
        if self._rows:
            self._shares = (*self._shares, self._zero / self._rows)[-_FIRST_ROUNDS:]
            self._rows = self._zero = 0
            full = len(self._shares) == _FIRST_ROUNDS
            share = statistics.median(self._shares)
            before, self.leaves_out = self.leaves_out, full and share > self._pays_from
            if self.leaves_out != before:
                _log.info("%s travel %s", self._what, self.why)
        self._round = round
        self._rounds += 1
        due = self._rounds <= _FIRST_ROUNDS or self._rounds % _LOOK_EVERY == 0
        self._looks = due and not self.leaves_out

    def _count(self, some: np.ndarray) -> None:
        self._rows += len(some)
        self._zero += len(some) - int(np.count_nonzero(some))


def row_elems(shape: Sequence[int]) -> int:
    """Elements of what is left out together: a row, where it is of a good size."""
    length = math.prod(shape[1:]) if len(shape) > 1 else 0
    return length if _SHORTEST_ELEMS <= length <= _LONGEST_ELEMS else _BLOCK_ELEMS


def unpack(payload: memoryview, out: np.ndarray, keeps: bool = False) -> None:
    """Writes a slice that `ZeroRows` has packed; rows that were left out are zero, or stay as they
    are where it `keeps` them. ProtocolError for bytes that no sender makes."""
    whole = out.view(np.uint8)
    if len(payload) < TAIL_BYTES:
        raise _wrong(payload, out)
    row_bytes, head = _TAIL.unpack(payload[-TAIL_BYTES:])
    packed = np.frombuffer(payload, np.uint8)
    if not row_bytes:
        if len(payload) != len(whole) + TAIL_BYTES or head:
            raise _wrong(payload, out)
        whole[:] = packed[:-TAIL_BYTES]
        return
    if head >= row_bytes or head > len(whole):
        raise _wrong(payload, out)
    count = (len(whole) - head) // row_bytes
    end = head + count * row_bytes
    mask_at = len(payload) - TAIL_BYTES - -(-count // 8)
    if not count or mask_at < 0:
        raise _wrong(payload, out)
    some = np.unpackbits(packed[mask_at:-TAIL_BYTES], count=count).view(np.bool_)
    inner = head + int(np.count_nonzero(some)) * row_bytes
    if mask_at != inner + len(whole) - end:
        raise _wrong(payload, out)
    whole[:head] = packed[:head]
    rows = _words(whole[head:end], row_bytes)
    if not keeps:
        rows[:] = 0
    rows[some] = _words(packed[head:inner], row_bytes)
    whole[end:] = packed[inner:mask_at]


def _pack(
    whole: np.ndarray, bits: np.ndarray, some: np.ndarray, start: int, end: int, out: memoryview
) -> int:
    """Bytes before the first row, rows that are not zero, bytes behind the last row; a bit for each
    row, and the tail."""
    count = int(np.count_nonzero(some))
    if count == len(some):
        np.frombuffer(out, np.uint8, len(whole))[:] = whole
        out[len(whole) : len(whole) + TAIL_BYTES] = _TAIL.pack(0, 0)
        return len(whole) + TAIL_BYTES
    row_bytes = bits.shape[1] * bits.itemsize
    inner = start + count * row_bytes
    mask_at = inner + len(whole) - end
    mask = np.packbits(some)
    size = mask_at + len(mask)
    into = np.frombuffer(out, np.uint8, size)
    into[:start] = whole[:start]
    np.compress(some, bits, axis=0, out=_words(into[start:inner], row_bytes))
    into[inner:mask_at] = whole[end:]
    into[mask_at:] = mask
    out[size : size + TAIL_BYTES] = _TAIL.pack(row_bytes, start)
    return size + TAIL_BYTES


def _bits(elements: np.ndarray, offset: int, row_elems: int) -> Tuple[int, np.ndarray, int]:
    """A slice's whole rows as integers, and at which of its bytes they begin and end; the slice
    begins at an element of its key."""
    head = min(-offset % row_elems, len(elements))
    end = head + (len(elements) - head) // row_elems * row_elems
    item = elements.itemsize
    whole = elements.view(np.uint8)[head * item : end * item]
    return head * item, _words(whole, row_elems * item), end * item


def _words(whole: np.ndarray, row_bytes: int) -> np.ndarray:
    """Bytes by rows, as the largest integers of which a row has a whole number."""
    size = math.gcd(8, row_bytes)
    rows: np.ndarray = whole.view(f"u{size}").reshape(-1, row_bytes // size)
    return rows


def _nonzero(rows: np.ndarray) -> np.ndarray:
    some: np.ndarray = np.bitwise_or.reduce(rows, axis=1) != 0
    return some


def _wrong(payload: memoryview, out: np.ndarray) -> ProtocolError:
    return ProtocolError(
        f"it sent {len(payload)} bytes that are no {len(out)} elements without zero rows"
    )
