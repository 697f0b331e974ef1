"""Slices of which the largest elements travel, with their positions."""

from __future__ import annotations

from typing import Dict, Tuple

import numpy as np

from p3kv.codecs import positions
from p3kv.codecs.codec import CODECS, GRADIENTS, Codec, Decoder, Encoder, Part
from p3kv.codecs.selection import largest, share_of
from p3kv.errors import ConfigError


class SomeElements(Codec):
    """A codec by which some elements of a slice travel, as they are, with their positions."""

    def most_bytes(self, length_elems: int) -> int:
        count = share_of(self.most_share, length_elems)
        return count * self.dtype.itemsize + positions.most_bytes(length_elems, count)

    @property
    def most_share(self) -> float:
        """The largest share of a slice's elements that may travel."""
        raise NotImplementedError

    def write(self, values: np.ndarray, where: np.ndarray, length: int, out: memoryview) -> int:
        """Writes values of the key's dtype with their positions in a slice of `length` elements."""
        written = positions.write(where, length)
        np.frombuffer(out, self.dtype, len(values))[:] = values
        end = values.nbytes + len(written)
        out[values.nbytes : end] = written
        return end

    def read(self, payload: memoryview, length: int) -> Tuple[np.ndarray, np.ndarray]:
        """Positions and values; ProtocolError for what `write` does not write."""
        where, values = positions.read(payload, length, self.dtype.itemsize)
        return where, np.frombuffer(values, self.dtype)


class SomeGradients(Decoder):
    """Decodes gradients of which some elements have travelled: the others are zero."""

    codec: SomeElements

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        out[:] = 0
        self.add(payload, part, out)

    def add(self, payload: memoryview, part: Part, total: np.ndarray) -> None:
        where, values = self.codec.read(payload, len(total))
        with np.errstate(over="ignore", invalid="ignore"):
            total[where] += values


class TopK(SomeElements):
    """The share of a slice's elements with the largest magnitudes travels, unrounded.

    Gradients: the sender adds an element to its residual, what of it has not been sent. Those with
    the largest residuals are sent, and their residuals are zero then. So what was sent and what is
    kept back are together all that there was.

    Values: the server keeps what each worker has. It sends the elements that differ most from that,
    and the worker keeps the others as they are. So each element that a worker has is one that the
    server has had, and no worker drifts away.

    The idea is section 2.3.3 of the modular parameter server; there the sender of values remembers
    nothing of them, and sends the largest.
    """

    of_each_worker = True

    def __init__(
        self, size_elems: int, dtype: np.dtype, share: float = 0.01, exact: bool = False
    ) -> None:
        """`share` is above 0 and at most 1. `exact`: all elements are sorted to find the largest,
        which takes several times as long as by a sample. Raises ConfigError for other values."""
        super().__init__(size_elems, dtype)
        self.share = checked_share("topk", share)
        if not isinstance(exact, bool):
            raise ConfigError(f"the codec 'topk' has exact={exact!r}; it must be true or false")
        self.exact = exact

    @property
    def most_share(self) -> float:
        return self.share

    def encoder(self, direction: str) -> Encoder:
        return _GradientEncoder(self) if direction == GRADIENTS else _ValueEncoder(self)

    def decoder(self, direction: str) -> Decoder:
        return SomeGradients(self) if direction == GRADIENTS else _ValueDecoder(self)


class _GradientEncoder(Encoder):
    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._codec = codec
        self._residual = np.zeros(codec.size_elems, wide(codec.dtype))

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        residual = self._residual[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(residual, elements, out=residual)
        count = share_of(self._codec.share, len(elements))
        where = largest(np.abs(residual), count, self._codec.exact)
        return self._codec.write(
            taken(residual, where, self._codec.dtype), where, len(elements), out
        )

    def memory(self) -> Dict[str, np.ndarray]:
        return {"residual": self._residual}


class _ValueEncoder(Encoder):
    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._codec = codec
        self._has = np.zeros(codec.size_elems, codec.dtype)
        """What the worker has."""

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        has = self._has[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.abs(elements - has)
        count = share_of(self._codec.share, len(elements))
        where = largest(changes, count, self._codec.exact)
        values = elements[where]
        has[where] = values
        return self._codec.write(values, where, len(elements), out)

    def sent_as_it_is(self, elements: np.ndarray, part: Part) -> None:
        self._has[part.offset : part.offset + len(elements)] = elements


class _ValueDecoder(Decoder):
    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._codec = codec
        self._has = np.zeros(codec.size_elems, codec.dtype)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        where, values = self._codec.read(payload, len(out))
        has = self._has[part.offset : part.offset + len(out)]
        has[where] = values
        out[:] = has

    def arrived_as_it_is(self, elements: np.ndarray, part: Part) -> None:
        self._has[part.offset : part.offset + len(elements)] = elements


def checked_share(name: str, share: object) -> float:
    """A codec's share; ConfigError for what is none."""
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 < float(share) <= 1:  # type: ignore[arg-type]
        raise ConfigError(
            f"the share of the codec '{name}' is {share!r}; it must be a number above 0 and at "
            "most 1, such as 0.01 for one element of a hundred"
        )
    return float(share)  # type: ignore[arg-type]


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype of a residual. Float16 has no room for a small gradient beside a large one."""
    return np.promote_types(dtype, np.float32)


def taken(residual: np.ndarray, where: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Takes elements out of a residual, as they travel; what rounding leaves over stays."""
    there = residual[where]
    with np.errstate(invalid="ignore", over="ignore"):
        values: np.ndarray = there.astype(dtype)
        left = there - values
    left[~np.isfinite(left)] = 0  # infinity and NaN are sent once
    residual[where] = left
    return values


CODECS.register("topk", TopK)
