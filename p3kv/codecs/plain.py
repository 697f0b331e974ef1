"""Codecs without a memory: identity and half precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from p3kv.codecs.codec import CODECS, VALUES, Decoder, Part, Stateless
from p3kv.codecs.zero_rows import TAIL_BYTES, unpack
from p3kv.errors import ProtocolError


class Identity(Stateless):
    """Slices travel as they are in memory: nothing is copied, and no number changes.

    A sender may leave rows out (`ZeroRows`); its frame is encoded then.
    """

    in_place = True

    @classmethod
    def carries(cls, dtype: np.dtype) -> bool:
        return True

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * self.dtype.itemsize + TAIL_BYTES

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        raise AssertionError("slices travel as they are")

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        unpack(payload, out)

    def decoder(self, direction: str) -> Decoder:
        return _Changes(self) if direction == VALUES else self


class _Changes(Decoder):
    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        unpack(payload, out, keeps=True)


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
