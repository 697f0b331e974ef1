"""What a codec does, and the table from which a key's codecs are chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Tuple, Type

import numpy as np

from p3kv.common.registry import Choice, Registry
from p3kv.errors import ConfigError

GRADIENTS, VALUES = "gradients", "values"
"""The directions: to the servers, and back to the workers."""


class Codec(ABC):
    """Encodes and decodes the slices of one key in one direction, gradients or values.

    Every process makes one object for each key and direction, and calls it from one thread. The
    sender encodes each slice once in a round: a server sends the same bytes to all workers. A codec
    may keep what it did not send (a residual) for the next round. It keeps it by element, because
    the slices of a later round may have other sizes.
    """

    directions: Tuple[str, ...] = (GRADIENTS, VALUES)
    """What the codec may encode. The part of a gradient that a codec keeps back arrives with a
    later gradient, so their sum is right. A value that lacks a part is a wrong weight, so a codec
    whose values may be far from what they stand for is for gradients only."""

    remembers = True
    """Whether what a slice becomes depends on what was encoded before, by a residual for example.
    If not, the workers of one host sum their gradients first, and the sum is encoded once."""

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


_VARIABLES = {GRADIENTS: "P3KV_GRADIENT_CODEC", VALUES: "P3KV_VALUE_CODEC"}
CODECS: Registry[Codec] = Registry(
    "codec", "every worker and server", " or ".join(_VARIABLES.values())
)
"""Codecs by name."""


class KeyCodecs(NamedTuple):
    """A key's codecs in one process."""

    gradients: Codec
    values: Codec


def check_codec(choice: Choice, direction: str) -> None:
    """Raises ConfigError for a codec that nobody has registered here, that is not for this
    direction, or whose parameters are wrong."""
    _find(choice, direction)
    CODECS.make(choice, 0, np.dtype(np.float32))


def make_codec(choice: Choice, direction: str, size_elems: int, dtype: np.dtype) -> Codec:
    """The codec of a key in one direction; raises what `check_codec` raises."""
    if not _find(choice, direction).carries(dtype):
        choice = Choice("identity")
    return CODECS.make(choice, size_elems, dtype)


def make_codecs(gradients: Choice, values: Choice, size_elems: int, dtype: np.dtype) -> KeyCodecs:
    """The codecs of a key; raises what `make_codec` raises."""
    return KeyCodecs(
        make_codec(gradients, GRADIENTS, size_elems, dtype),
        make_codec(values, VALUES, size_elems, dtype),
    )


def _find(choice: Choice, direction: str) -> Type[Codec]:
    found = CODECS.find(choice.name)
    if direction not in found.directions:
        able = [name for name in CODECS.names() if direction in CODECS.find(name).directions]
        raise ConfigError(
            f"the codec {choice} is for {' and '.join(found.directions)} only: {direction} would "
            f"arrive wrong. For {direction} there are {', '.join(able)} "
            f"({_VARIABLES[direction]})"
        )
    return found
