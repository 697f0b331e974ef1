"""Codecs without a memory: identity, half precision, and blocks that are not zero."""

from __future__ import annotations

import struct
from typing import Tuple

import ml_dtypes
import numpy as np

from p3kv.codecs.codec import CODECS, Part, Stateless
from p3kv.errors import ProtocolError


class Identity(Stateless):
    """Slices travel as they are in memory: nothing is copied, and no number changes."""

    in_place = True

    @classmethod
    def carries(cls, dtype: np.dtype) -> bool:
        return True

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * self.dtype.itemsize

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        raise AssertionError("slices travel as they are")

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        raise AssertionError("slices travel as they are")


CODECS.register("identity", Identity)


class _Halves(Stateless):
    half: np.dtype

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * self.half.itemsize

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        with np.errstate(over="ignore"):
            np.frombuffer(out, self.half)[:] = elements
        return len(out)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        out[:] = self._halves(payload, out)

    def add(self, payload: memoryview, part: Part, total: np.ndarray) -> None:
        # With the dtype: numpy has no common one of float16 and bfloat16.
        np.add(total, self._halves(payload, total).astype(total.dtype, copy=False), out=total)

    def _halves(self, payload: memoryview, elements: np.ndarray) -> np.ndarray:
        if len(payload) != len(elements) * self.half.itemsize:
            raise ProtocolError(
                f"it sent {len(payload)} bytes for {len(elements)} elements of {self.half}"
            )
        return np.frombuffer(payload, self.half)


class Float16(_Halves):
    """Elements travel as IEEE 754 half-precision numbers, rounded to nearest.

    Sums and weights on the servers keep the key's dtype. Numbers above 65,504 become infinite.
    """

    half = np.dtype("<f2")


class BFloat16(_Halves):
    """Elements travel as bfloat16, rounded to nearest: float32's range, and 8 bits of precision.

    Sums and weights on the servers keep the key's dtype.
    """

    half = np.dtype(ml_dtypes.bfloat16)


CODECS.register("float16", Float16)
CODECS.register("bfloat16", BFloat16)


_BLOCK_ELEMS = 128
"""Rows of embeddings often have a multiple of it."""
_SAMPLED = 64
_LEAST_ZERO = 1 / 4
"""Where fewer blocks are zero, looking for them and copying costs more than it saves."""
_END = struct.Struct("<BB")
"""Whether blocks are left out, and how many elements come before the first block."""


class NonzeroBlocks(Stateless):
    """Blocks of 128 elements that are all zero bits do not travel; nothing is rounded.

    Blocks begin at multiples of 128 elements of the key, so rows of that many elements, or of
    twice as many, are blocks. The sender looks at a sample of a slice's blocks first. Where few of
    them are zero, all elements travel.

    A payload has the elements before the first block, those of the blocks that are not zero and
    those behind the last block; then one bit a block, and two bytes that say what is before them.
    """

    @classmethod
    def carries(cls, dtype: np.dtype) -> bool:
        return True

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * self.dtype.itemsize + _END.size

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        head = min(-part.offset % _BLOCK_ELEMS, len(elements))
        blocks, end = self._blocks(elements, head)
        step = max(1, len(blocks) // _SAMPLED)
        if len(blocks) and _share_of_zero(blocks[::step]) >= _LEAST_ZERO:
            some = _nonzero(blocks)
            count = int(np.count_nonzero(some))
            if count <= len(blocks) * (1 - _LEAST_ZERO):
                inner = head + count * _BLOCK_ELEMS
                kept = inner + len(elements) - end
                into = np.frombuffer(out, self.dtype, kept)
                into[:head] = elements[:head]
                np.compress(some, blocks, axis=0, out=into[head:inner].reshape(-1, _BLOCK_ELEMS))
                into[inner:] = elements[end:]
                bits = np.packbits(some).tobytes()
                start = kept * self.dtype.itemsize
                tail = bits + _END.pack(1, head)
                out[start : start + len(tail)] = tail
                return start + len(tail)
        np.frombuffer(out, self.dtype, len(elements))[:] = elements
        out[-_END.size :] = _END.pack(0, 0)
        return len(out)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        if len(payload) < _END.size:
            raise self._wrong(payload, out)
        left_out, head = _END.unpack(payload[-_END.size :])
        if not left_out:
            if len(payload) != self.most_bytes(len(out)) or head:
                raise self._wrong(payload, out)
            out[:] = np.frombuffer(payload, self.dtype, len(out))
            return
        if left_out != 1 or head > len(out) or head >= _BLOCK_ELEMS:
            raise self._wrong(payload, out)
        blocks, end = self._blocks(out, head)
        bits_bytes = -(-len(blocks) // 8)
        start = len(payload) - _END.size - bits_bytes
        if start < 0:
            raise self._wrong(payload, out)
        bits = np.frombuffer(payload[start : start + bits_bytes], np.uint8)
        some = np.unpackbits(bits, count=len(blocks)).view(np.bool_)
        inner = head + int(np.count_nonzero(some)) * _BLOCK_ELEMS
        kept = inner + len(out) - end
        if start != kept * self.dtype.itemsize:
            raise self._wrong(payload, out)
        elements = np.frombuffer(payload, self.dtype, kept)
        out[:] = 0
        out[:head] = elements[:head]
        blocks[some] = elements[head:inner].reshape(-1, _BLOCK_ELEMS)
        out[end:] = elements[inner:]

    @staticmethod
    def _blocks(elements: np.ndarray, head: int) -> Tuple[np.ndarray, int]:
        """The blocks behind the first `head` elements, and where they end."""
        end = head + (len(elements) - head) // _BLOCK_ELEMS * _BLOCK_ELEMS
        return elements[head:end].reshape(-1, _BLOCK_ELEMS), end

    @staticmethod
    def _wrong(payload: memoryview, out: np.ndarray) -> ProtocolError:
        return ProtocolError(
            f"it sent {len(payload)} bytes that are no {len(out)} elements without zero blocks"
        )


def _nonzero(blocks: np.ndarray) -> np.ndarray:
    """Mask of the blocks with a bit set: bits count, not numbers, since -0.0 travels, too."""
    some: np.ndarray = np.bitwise_or.reduce(blocks.view(np.uint64), axis=1) != 0
    return some


def _share_of_zero(blocks: np.ndarray) -> float:
    return 1 - float(np.count_nonzero(_nonzero(blocks))) / len(blocks)


CODECS.register("nonzero_blocks", NonzeroBlocks)
