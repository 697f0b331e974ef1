"""A codec of a user's own: slices as whole numbers of 8 bits and one scale.

A slice's largest element becomes 127 or -127. What rounding leaves over waits for the next round.
"""

import numpy as np

from p3kv.codecs import CODECS, Codec
from p3kv.errors import ProtocolError

LARGEST = 127


class Int8(Codec):
    """Keeps by element what it did not send."""

    def __init__(self, size_elems: int, dtype: np.dtype) -> None:
        super().__init__(size_elems, dtype)
        self._residual = np.zeros(size_elems, dtype)

    def most_bytes(self, length_elems: int) -> int:
        return 8 + length_elems

    def encode(self, elements: np.ndarray, offset: int, out: memoryview) -> int:
        wanted = self._residual[offset : offset + len(elements)]
        wanted += elements
        scale = np.float64(abs(wanted).max() / LARGEST)
        steps = np.rint(wanted / (scale or 1)).astype(np.int8)
        wanted -= steps * scale
        out[:8], out[8:] = scale.tobytes(), steps.tobytes()
        return len(out)

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        if len(payload) != self.most_bytes(len(out)):
            raise ProtocolError(f"it sent {len(payload)} bytes for {len(out)} elements of 8 bits")
        out[:] = np.frombuffer(payload[8:], np.int8) * np.frombuffer(payload[:8])


CODECS.register("int8", Int8)
