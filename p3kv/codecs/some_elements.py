"""Slices of which some elements travel, unrounded, with their positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Tuple

import numpy as np

from p3kv.codecs import positions
from p3kv.codecs.codec import Codec, Decoder, Part
from p3kv.codecs.selection import share_of
from p3kv.errors import ConfigError


class SomeElements(Codec):
    """A codec by which some elements of a slice travel, as they are, with their positions."""

    def most_bytes(self, length_elems: int) -> int:
        count = share_of(self.most_share, length_elems)
        return count * self.dtype.itemsize + positions.most_bytes(length_elems, count)

    @property
    @abstractmethod
    def most_share(self) -> float:
        """The largest share of a slice's elements that may travel."""

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
