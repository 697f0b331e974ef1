"""The largest elements of each slice."""

from __future__ import annotations

from typing import Dict

import numpy as np

from p3kv.codecs.codec import CODECS, GRADIENTS, Decoder, Encoder, Part
from p3kv.codecs.selection import largest, share_of
from p3kv.codecs.some_elements import SomeElements, SomeGradients, checked_share, taken, wide
from p3kv.errors import ConfigError


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
    codec: TopK

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._residual = np.zeros(codec.size_elems, wide(codec.dtype))

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        residual = self._residual[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(residual, elements, out=residual)
        count = share_of(self.codec.share, len(elements))
        where = largest(np.abs(residual), count, self.codec.exact)
        return self.codec.write(taken(residual, where, self.codec.dtype), where, len(elements), out)

    def memory(self) -> Dict[str, np.ndarray]:
        return {"residual": self._residual}


class _ValueEncoder(Encoder):
    codec: TopK

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._has = np.zeros(codec.size_elems, codec.dtype)
        """What the worker has."""

    def encode(self, elements: np.ndarray, part: Part, out: memoryview) -> int:
        has = self._has[part.offset : part.offset + len(elements)]
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.abs(elements - has)
        count = share_of(self.codec.share, len(elements))
        where = largest(changes, count, self.codec.exact)
        values = elements[where]
        has[where] = values
        return self.codec.write(values, where, len(elements), out)

    def sent_as_it_is(self, elements: np.ndarray, part: Part) -> None:
        self._has[part.offset : part.offset + len(elements)] = elements


class _ValueDecoder(Decoder):
    codec: TopK

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)
        self._has = np.zeros(codec.size_elems, codec.dtype)

    def decode(self, payload: memoryview, part: Part, out: np.ndarray) -> None:
        where, values = self.codec.read(payload, len(out))
        has = self._has[part.offset : part.offset + len(out)]
        has[where] = values
        out[:] = has

    def arrived_as_it_is(self, elements: np.ndarray, part: Part) -> None:
        self._has[part.offset : part.offset + len(elements)] = elements


CODECS.register("topk", TopK)
