"""Slices as half-precision numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from p3kv.codecs.codec import CODECS, Part, Stateless
from p3kv.errors import ProtocolError


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
