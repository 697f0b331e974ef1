"""A codec that changes nothing, and notices what is encoded twice or out of turn."""

from __future__ import annotations

import numpy as np

from p3kv.codecs import CODECS, Codec, Decoder, Encoder, Part


class Once(Codec):
    """As it is in memory, and no element twice for one round."""

    def most_bytes(self, length_elems: int) -> int:
        return length_elems * self.dtype.itemsize

    def encoder(self, direction: str) -> Encoder:
        return OnceEncoder(self)

    def decoder(self, direction: str) -> Decoder:
        return OnceDecoder(self)


class OnceEncoder(Encoder):
    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._rounds = np.zeros(codec.size_elems, np.int64)

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        rounds = self._rounds[part.offset : part.offset + len(elements)]
        assert (rounds < part.round).all() and part.step >= part.round
        rounds[:] = part.round
        out[:] = elements.tobytes()
        return len(out)


class OnceDecoder(Decoder):
    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        assert part.step >= part.round > 0
        out[:] = np.frombuffer(payload, out.dtype)


CODECS.register("once", Once)
