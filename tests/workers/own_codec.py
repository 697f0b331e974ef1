"""A codec of a user's own: gradients in two bits each, as MXNet's 2-bit compression.

An element travels as the threshold, its negative or nothing; the rest waits for the next round.
"""

import numpy as np

from p3kv.codecs import CODECS, Codec
from p3kv.errors import ProtocolError

THRESHOLD = 0.5


class TwoBit(Codec):
    """Keeps by element what it did not send."""

    def __init__(self, size_elems: int, dtype: np.dtype) -> None:
        super().__init__(size_elems, dtype)
        self._residual = np.zeros(size_elems, dtype)

    def most_bytes(self, length_elems: int) -> int:
        return 2 * -(-length_elems // 8)

    def encode(self, elements: np.ndarray, offset: int, out: memoryview) -> int:
        wanted = self._residual[offset : offset + len(elements)]
        wanted += elements
        signs = [np.packbits(wanted >= THRESHOLD), np.packbits(wanted <= -THRESHOLD)]
        wanted -= THRESHOLD * np.sign(wanted) * (abs(wanted) >= THRESHOLD)
        out[:] = np.concatenate(signs).data
        return len(out)

    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        if len(payload) != self.most_bytes(len(out)):
            raise ProtocolError(f"it sent {len(payload)} bytes for {len(out)} elements of two bits")
        signs = np.frombuffer(payload, np.uint8).reshape(2, -1)
        up, down = (np.unpackbits(half)[: len(out)].astype(out.dtype) for half in signs)
        np.multiply(up - down, out.dtype.type(THRESHOLD), out=out)


CODECS.register("two_bit", TwoBit)
