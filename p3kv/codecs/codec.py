"""What a codec does, and the table from which a key's codecs are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from p3kv.registry import Choice, Registry


class Codec(ABC):
    """Encodes and decodes the slices of one key in one direction, gradients or values.

    Every process makes one object for each key and direction, and calls it from one thread. The
    sender encodes each slice once in a round: a server sends the same bytes to all workers. A codec
    may keep what it did not send (a residual) for the next round. It keeps it by element, because
    the slices of a later round may have other sizes.
    """

    in_place = False
    """Whether slices travel as they are in memory; then no other method is called."""

    def __init__(self, size_elems: int, dtype: np.dtype) -> None:
        """The key's size and dtype.

        A codec of its own may take parameters besides, by name: plain values that travel with the
        codec's name. It raises ConfigError for wrong ones, also for a key without elements.
        """
        self.size_elems = size_elems
        self.dtype = dtype

    @classmethod
    def carries(cls, dtype: np.dtype) -> bool:
        """Whether the codec is for keys of this dtype; others travel as they are in memory."""
        return dtype.kind == "f"

    @abstractmethod
    def most_bytes(self, length_elems: int) -> int:
        """The most bytes that a slice of so many elements may have on the wire."""

    @abstractmethod
    def encode(self, elements: np.ndarray, offset: int, out: memoryview) -> int:
        """Writes a slice into `out`, which has `most_bytes`, and returns how many bytes it has.

        `offset` is the slice's first element in the key. `elements` must stay as they are.
        """

    @abstractmethod
    def decode(self, payload: memoryview, out: np.ndarray) -> None:
        """Writes a slice's elements into `out`; ProtocolError for a payload that `encode` does not
        make."""

    def add(self, payload: memoryview, total: np.ndarray) -> None:
        """Adds a slice's elements to `total`, as `decode` gives them.

        `total` is of the key's dtype, or float32 where the key is float16.
        """
        elements = np.empty(len(total), self.dtype)
        self.decode(payload, elements)
        np.add(total, elements, out=total)


CODECS: Registry[Codec] = Registry(
    "codec", "every worker and server", "P3KV_GRADIENT_CODEC or P3KV_VALUE_CODEC"
)
"""Codecs by name."""


class KeyCodecs(NamedTuple):
    """A key's codecs in one process."""

    gradients: Codec
    values: Codec


def make_codec(choice: Choice, size_elems: int, dtype: np.dtype) -> Codec:
    """The codec of a key in one direction.

    Raises ConfigError for a name that nobody has registered here, and for wrong parameters.
    """
    if not CODECS.find(choice.name).carries(dtype):
        choice = Choice("identity")
    return CODECS.make(choice, size_elems, dtype)


def make_codecs(gradients: Choice, values: Choice, size_elems: int, dtype: np.dtype) -> KeyCodecs:
    """The codecs of a key; raises what `make_codec` raises."""
    return KeyCodecs(*(make_codec(choice, size_elems, dtype) for choice in (gradients, values)))
