"""A codec of a user's own: slices as whole numbers of 8 bits and one scale.

A slice's largest element becomes 127 or -127. What rounding leaves over waits for the next round.
"""

from typing import Dict

import numpy as np

from p3kv.codecs import CODECS, Codec, Decoder, Encoder, Part
from p3kv.errors import ProtocolError

LARGEST = 127


class Int8(Codec):
    def most_bytes(self, length_elems: int) -> int:
        return 8 + length_elems

    def encoder(self, direction: str) -> Encoder:
        return Int8Encoder(self)

    def decoder(self, direction: str) -> Decoder:
        return Int8Decoder(self)


class Int8Encoder(Encoder):
    def __init__(self, codec: Int8) -> None:
        super().__init__(codec)
        self._residual = np.zeros(codec.size_elems, codec.dtype)

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        wanted = self._residual[part.offset : part.offset + len(elements)]
        wanted += elements
        scale = np.float64(abs(wanted).max() / LARGEST)
        steps = np.rint(wanted / (scale or 1)).astype(np.int8)
        wanted -= steps * scale
        out[:8], out[8:] = scale.tobytes(), steps.tobytes()
        return len(out)

    def memory(self) -> Dict[str, np.ndarray]:
        return {"residual": self._residual}


class Int8Decoder(Decoder):
    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        if len(payload) != 8 + len(out):
            raise ProtocolError(f"it sent {len(payload)} bytes for {len(out)} elements of 8 bits")
        out[:] = np.frombuffer(payload[8:], np.int8) * np.frombuffer(payload[:8])


CODECS.register("int8", Int8)
