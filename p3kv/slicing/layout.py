"""Layouts: which elements of a tensor stay together, on a server and in a slice; each by its name.

Dense, the only member, keeps nothing together. A layout of a matrix's rows would keep each row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Sequence, Tuple

from p3kv.config import MAX_SLICE_ELEMS
from p3kv.errors import ConfigError, in_one_line
from p3kv.registry import Registry
from p3kv.slicing.slices import Run, Slice, check_count, cut


class Layout(ABC):
    """How a key's tensor may be divided: into runs for the servers, and runs into slices.

    Every process that handles a key makes one object, with the tensor's shape. All objects must
    answer alike, so an answer depends on the shape and on nothing else.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.size_elems = math.prod(self.shape)
        """How many elements the tensor has; 0 is allowed."""

    @property
    @abstractmethod
    def grain_elems(self) -> int:
        """How many consecutive elements stay together: every run and every slice has whole grains.

        At least 1, also where the tensor is empty. The tensor has whole grains, too.
        """

    def full_slice_elems(self, slice_size: int) -> int:
        """The elements of a full slice: whole grains of at most `slice_size` elements together.

        A grain with more elements than that is a slice of its own.
        """
        return max(1, slice_size // self.grain_elems) * self.grain_elems

    def slices(self, runs: Sequence[Run], slice_size: int) -> Tuple[Slice, ...]:
        """The slices of a tensor with these runs, by index; each lies in one run."""
        return cut(runs, self.full_slice_elems(slice_size))

    def check_slices(self, runs: Sequence[Run], slice_size: int) -> None:
        """Raises ProtocolError where `slices` would give more slices than a key may have."""
        check_count(runs, self.full_slice_elems(slice_size))

    def has_whole_grains(self, runs: Sequence[Run]) -> bool:
        """Whether these runs keep together what stays together."""
        return not any(length % self.grain_elems for _, length in runs)


class Dense(Layout):
    """Every element on its own: runs and slices of any length."""

    grain_elems = 1


LAYOUTS: Registry[Layout] = Registry("layout", "every process", dense=Dense)
"""Layouts by name."""


def make_layout(name: str, shape: Sequence[int]) -> Layout:
    """The layout with this name of a tensor; ConfigError if there is none, or if it can't be right
    for this shape."""
    member = LAYOUTS.find(name)
    try:
        layout = member(shape)
        grain_elems = layout.grain_elems
        fits = 1 <= grain_elems <= MAX_SLICE_ELEMS and layout.size_elems % grain_elems == 0
    except Exception as error:
        # It may be a user's own.
        raise ConfigError(
            f"the layout {name!r} failed for the shape {tuple(shape)}: {in_one_line(error)}"
        ) from error
    if not isinstance(grain_elems, int) or not fits:
        raise ConfigError(
            f"the layout {name!r} keeps {grain_elems!r} elements together of the shape "
            f"{tuple(shape)}; it must be a whole number from 1 to {MAX_SLICE_ELEMS}, and a divisor "
            f"of the {layout.size_elems} elements"
        )
    return layout
