"""A codec that changes nothing; who decodes takes so many seconds for each slice and element."""

import time

import numpy as np

from p3kv.codecs import CODECS, Part
from p3kv.codecs.codec import Stateless


class Slow(Stateless):
    def __init__(
        self, size_elems: int, dtype: np.dtype, element_s: float = 0.0, slice_s: float = 0.0
    ) -> None:
        super().__init__(size_elems, dtype)
        self._element_s, self._slice_s = element_s, slice_s

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * self.dtype.itemsize

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        out[:] = elements.tobytes()
        return len(out)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        time.sleep(self._slice_s + self._element_s * len(out))
        out[:] = np.frombuffer(payload, out.dtype)


CODECS.register("slow", Slow)
