"""A tensor's runs on the servers, and its slices: what is sent, summed and updated as a unit."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from p3kv.errors import ProtocolError

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
) -> List[Run]:
    """Returns the runs of a tensor, the server of its first slice first.

    `loads_elems` are the elements that each server keeps already, and `shares` the part of all that
    each should keep; without them equal parts. Each slice goes to the server that would have the
    least for its share then. So with equal parts no server keeps over one slice more than another:
    an iteration takes as long as the link of the server with the most elements. Full slices go
    round robin, as in P3 section 4.2, but a bias with few elements does not count like a full
    slice.
    """
    equal = [1.0] * len(loads_elems)
    servers = [
        ((load + slice_size) / share, server, load, share)
        for server, (load, share) in enumerate(zip(loads_elems, shares or equal))
        if share > 0
    ]
    heapq.heapify(servers)
    runs: Dict[int, int] = {}
    for length in _lengths(size_elems, slice_size):
        _, server, load, share = servers[0]
        load += length
        heapq.heapreplace(servers, ((load + slice_size) / share, server, load, share))
        runs[server] = runs.get(server, 0) + length
    return list(runs.items())


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
