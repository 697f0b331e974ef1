"""Slices as elements of two bits."""

from __future__ import annotations

import math
from typing import Dict

import numpy as np

from p3kv.codecs.codec import CODECS, GRADIENTS, Codec, Decoder, Encoder, Part
from p3kv.errors import ConfigError, ProtocolError

_LEAST, _MOST = 1e-6, 65504.0
"""Thresholds that are neither zero nor infinite in any dtype."""


class TwoBit(Codec):
    """An element travels as `threshold`, its negative, or nothing.

    The sender adds an element to its residual, the part that has not been sent. When the sum
    reaches the threshold or its negative, that is what travels, and the rest is the new residual.
    A residual that became NaN stays NaN, and its element is sent no more.

    A payload is two rows of bits: which elements are the threshold, and which are its negative.
    """

    directions = (GRADIENTS,)

    def __init__(self, size_elems: int, dtype: np.dtype, threshold: float = 0.5) -> None:
        """Raises ConfigError for a threshold out of range."""
        super().__init__(size_elems, dtype)
        try:
            value = float(threshold)
        except ValueError:
            value = math.nan
        if not _LEAST <= value <= _MOST:
            raise ConfigError(
                f"the threshold of the codec '2bit' is {threshold!r}; it must be a number from "
                f"{_LEAST} to {_MOST}"
            )
        self.threshold = dtype.type(value)

    def most_bytes(self, length_elems: int) -> int:
        return 2 * -(-length_elems // 8)

    def encoder(self, direction: str) -> Encoder:
        return _Encoder(self)

    def decoder(self, direction: str) -> Decoder:
        return _Decoder(self)


class _Encoder(Encoder):
    def __init__(self, codec: TwoBit) -> None:
        super().__init__(codec)
        self._threshold = codec.threshold
        # Float16 has no room for a small gradient beside a large residual: it would be lost.
        dtype = np.promote_types(codec.dtype, np.float32)
        self._residual = np.zeros(codec.size_elems, dtype)

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        residual = self._residual[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(residual, elements, out=residual)
            up, down = residual >= self._threshold, residual <= -self._threshold
            signs = np.subtract(up.view(np.int8), down.view(np.int8))
            residual -= np.multiply(signs, self._threshold, dtype=residual.dtype)
        rows = np.frombuffer(out, np.uint8).reshape(2, -1)
        rows[0], rows[1] = np.packbits(up), np.packbits(down)
        return len(out)

    def memory(self) -> Dict[str, np.ndarray]:
        return {"residual": self._residual}


class _Decoder(Decoder):
    def __init__(self, codec: TwoBit) -> None:
        super().__init__(codec)
        self._threshold = codec.threshold

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        # With the dtype: numpy would take an int8 times a scalar for half-precision numbers.
        np.multiply(
            self._signs(payload, len(out)), self._threshold, out=out, dtype=self.codec.dtype
        )

    def add(self, payload: memoryview, part: Part, total: np.ndarray) -> None:
        signs = self._signs(payload, len(total))
        np.add(total, np.multiply(signs, self._threshold, dtype=self.codec.dtype), out=total)

    def _signs(self, payload: memoryview, length_elems: int) -> np.ndarray:
        """1, -1 or 0 for each element; ProtocolError for a payload that no encoder makes."""
        if len(payload) != self.codec.most_bytes(length_elems):
            raise ProtocolError(
                f"it sent {len(payload)} bytes for {length_elems} elements of two bits"
            )
        up, down = np.frombuffer(payload, np.uint8).reshape(2, -1)
        behind = length_elems % 8 and (up[-1] | down[-1]) & (0xFF >> length_elems % 8)
        if behind or np.bitwise_and(up, down).any():
            raise ProtocolError(
                f"it sent {length_elems} elements of two bits of which some are neither the "
                "threshold, nor its negative, nor nothing"
            )
        signs: np.ndarray = np.unpackbits(up, count=length_elems).view(np.int8)
        signs -= np.unpackbits(down, count=length_elems).view(np.int8)
        return signs


CODECS.register("2bit", TwoBit)
