"""A tensor's runs on the servers, and its slices: what is sent, summed and updated as a unit."""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from p3kv.common.registry import Registry
from p3kv.config import MAX_SLICE_ELEMS
from p3kv.errors import ConfigError, ProtocolError, in_one_line

_FULL_PARTS = 4
"""How many slices at most a full one may become for the sake of even parts."""
MAX_KEY_SLICES = 2**20
"""Most slices of a key: more would take seconds and a gigabyte to cut."""

Run = Tuple[int, int]
"""The rank of a server, and how many consecutive elements of a tensor it keeps. Runs follow each
other in the tensor, and each server has at most one."""


@dataclass(frozen=True)
class Slice:
    """Some elements of one key's flattened tensor (P3 section 4.2), by its layout whole grains."""

    index: int
    offset: int
    length: int
    """Offset and length count elements."""
    server: int
    """Rank of the server that sums and keeps this slice."""


def balanced_runs(
    size_elems: int,
    slice_size: int,
    loads_elems: Sequence[int],
    shares: Optional[Sequence[float]] = None,
    grain_elems: int = 1,
) -> List[Run]:
    """Returns the runs of a tensor, the server of its first slice first.

    `loads_elems` are the elements that each server keeps already, and `shares` the part of all that
    each should keep; without them equal parts. Each slice goes to the server that would have the
    least for its share then. So with equal parts no server keeps over one slice more than another:
    an iteration takes as long as the link of the server with the most elements. Full slices go
    round robin, as in P3 section 4.2, but a bias with few elements does not count like a full
    slice.

    A tensor of more than a slice, and of a quarter of one for each server, is in even parts of
    whole grains where loads are even: in a model of few large arrays no others travel beside it,
    and servers without a part would idle.
    """
    kept = [
        (load, server, share)
        for server, (load, share) in enumerate(zip(loads_elems, shares or [1.0] * len(loads_elems)))
        if share > 0
    ]
    runs: Dict[int, int] = {}
    parts = _even_parts(size_elems, slice_size, kept, grain_elems)
    if parts:
        kept = [(load + part, server, share) for (load, server, share), part in zip(kept, parts)]
        first = sum(loads_elems) // slice_size % len(kept)
        runs = {kept[at - first][1]: parts[at - first] for at in range(len(kept))}
        size_elems, slice_size = size_elems - sum(parts), grain_elems
    servers = [((load + slice_size) / share, server, load, share) for load, server, share in kept]
    heapq.heapify(servers)
    for length in _lengths(size_elems, slice_size):
        _, server, load, share = servers[0]
        load += length
        heapq.heapreplace(servers, ((load + slice_size) / share, server, load, share))
        runs[server] = runs.get(server, 0) + length
    return list(runs.items())


def _even_parts(
    size_elems: int, slice_size: int, kept: Sequence[Tuple[int, int, float]], grain_elems: int
) -> List[int]:
    """The part of each server, by its share and rounded down to whole grains; none where a part is
    too small to be a slice, or where a server has a slice less than another and is to have more.

    `kept` has the elements of each server, its rank and its share.
    """
    together = sum(share for _, _, share in kept)
    parts = [int(size_elems * share / together) // grain_elems * grain_elems for *_, share in kept]
    fullest = max(load / share for load, _, share in kept)
    is_even = all((load + slice_size - grain_elems) / share >= fullest for load, _, share in kept)
    is_worth = size_elems > slice_size and _FULL_PARTS * min(parts) >= slice_size
    return parts if is_even and is_worth else []


def cut(runs: Sequence[Run], slice_size: int) -> Tuple[Slice, ...]:
    """Cuts a tensor into slices of `slice_size` elements; the last of each run may have fewer.

    Slices are numbered round robin over the servers, so that all links are busy from the start.
    Each slice lies in the run of one server, whatever the slice size.
    """
    offsets = list(itertools.accumulate((length for _, length in runs), initial=0))
    slices: List[Slice] = []
    for turn in itertools.zip_longest(*(_lengths(length, slice_size) for _, length in runs)):
        for place, length in enumerate(turn):
            if length is not None:
                slices.append(Slice(len(slices), offsets[place], length, runs[place][0]))
                offsets[place] += length
    return tuple(slices)


def check_count(runs: Sequence[Run], slice_size: int) -> None:
    """Raises ProtocolError where `cut` would give more slices than MAX_KEY_SLICES."""
    count = sum(-(-length // slice_size) for _, length in runs)
    if count > MAX_KEY_SLICES:
        raise ProtocolError(
            f"a tensor would be cut into {count} slices of {slice_size} elements; at most "
            f"{MAX_KEY_SLICES} are allowed. Set a larger P3KV_SLICE_SIZE."
        )


def loads_with(loads_elems: Sequence[int], runs: Sequence[Run]) -> List[int]:
    """Returns the elements that each server keeps when a tensor with these runs is added."""
    loads = list(loads_elems)
    for server, length in runs:
        loads[server] += length
    return loads


def _lengths(size_elems: int, most: int) -> List[int]:
    """Lengths of full slices, whose buffers a server reuses, and of one with the remainder."""
    rest = size_elems % most
    return [most] * (size_elems // most) + ([rest] if rest else [])


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
        At least 1, also where the tensor is empty. The tensor has whole grains, too."""

    def full_slice_elems(self, slice_size: int) -> int:
        """The elements of a full slice: whole grains of at most `slice_size` elements together. A
        grain with more elements than that is a slice of its own."""
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


class Bucket(Layout):
    """Small tensors that are one slice, on one server, whatever the slice size."""

    @property
    def grain_elems(self) -> int:
        return max(1, self.size_elems)


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


BUCKET = "bucket"
LAYOUTS: Registry[Layout] = Registry(
    "layout", "every process", dense=Dense, bucket=Bucket, touched_rows=TouchedRows,
    sparse_rows=SparseRows,
)  # fmt: skip
"""Layouts by name."""


def make_layout(name: str, shape: Sequence[int]) -> Layout:
    """Make a tensor's layout by name; ConfigError if there is none, or if it can't be right."""
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
