"""Layouts: which elements of a tensor stay together, on a server and in a slice; each by its name.

Dense keeps nothing together. Layouts of rows keep each row, and only touched rows travel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Sequence, Tuple

from p3kv.common.registry import Registry
from p3kv.config import MAX_SLICE_ELEMS
from p3kv.errors import ConfigError, in_one_line
from p3kv.slicing.slices import Run, Slice, check_count, cut

MAX_ROWS = 2**32 - 1
"""On the wire a row's number has 32 bits."""


class Layout(ABC):
    """How a key's tensor may be divided: into runs for the servers, and runs into slices.

    Every process that handles a key makes one object, with the tensor's shape. All objects must
    answer alike, so an answer depends on the shape and on nothing else.
    """

    touched_only = False
    """Whether only the grains travel that a worker names, with their numbers, and not slices."""

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


class TouchedRows(Layout):
    """A dense tensor whose gradients touch a few rows: what the first index counts."""

    touched_only = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        if not self.shape or self.shape[0] >= MAX_ROWS:
            raise ConfigError(f"a tensor of rows has from one dimension and below {MAX_ROWS} rows")

    @property
    def grain_elems(self) -> int:
        return max(1, math.prod(self.shape[1:]))


class SparseRows(TouchedRows):
    """A tensor that is sparse itself: workers have no copy and pull the rows that they need."""


LAYOUTS: Registry[Layout] = Registry(
    "layout", "every process", dense=Dense, touched_rows=TouchedRows, sparse_rows=SparseRows
)
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
