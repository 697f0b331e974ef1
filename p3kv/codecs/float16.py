"""Slices as half-precision numbers."""

from __future__ import annotations

import numpy as np

from p3kv.codecs.codec import CODECS, Part, Stateless
from p3kv.errors import ProtocolError

_HALF = np.dtype("<f2")


class Float16(Stateless):
    """Elements travel as IEEE 754 half-precision numbers, rounded to nearest.

    Sums and weights on the servers keep the key's dtype. Numbers above 65,504 become infinite.
    """

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * _HALF.itemsize

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        with np.errstate(over="ignore"):
            np.frombuffer(out, _HALF)[:] = elements
        return len(out)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        out[:] = self._halves(payload, out)

    def add(self, payload: memoryview, part: Part, total: np.ndarray) -> None:
        np.add(total, self._halves(payload, total), out=total)

    @staticmethod
    def _halves(payload: memoryview, elements: np.ndarray) -> np.ndarray:
        if len(payload) != len(elements) * _HALF.itemsize:
            raise ProtocolError(f"it sent {len(payload)} bytes for {len(elements)} half floats")
        return np.frombuffer(payload, _HALF)


CODECS.register("float16", Float16)
