"""A tensor's place on the servers, and its slices: what is sent, summed and updated at once."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from p3kv.errors import ProtocolError

MAX_KEY_SLICES = 2**20
"""Slices of a key: more take seconds to cut, and a gigabyte."""

Run = Tuple[int, int]
"""The rank of a server, and how many elements of a tensor it keeps. A tensor's runs follow each
other, and each server has one at most."""


@dataclass(frozen=True)
class Slice:
    """Some elements of one key's flattened tensor (P3 section 4.2)."""

    index: int
    offset: int
    length: int
    """Offset and length count elements."""
    server: int
    """Rank of the server that sums and keeps this slice."""


def balanced_runs(size_elems: int, slice_size: int, loads_elems: Sequence[int]) -> List[Run]:
    """Returns the runs of a tensor, the server of its first slice first.

    `loads_elems` are the elements that each server keeps already. Each slice goes to the server
    that has the fewest, so that none ever has more than one slice above another: an iteration
    takes as long as the link of the fullest. Full slices so go round robin, as in P3 section 4.2,
    but a bias does not count like a full slice.
    """
    servers = [(load, server) for server, load in enumerate(loads_elems)]
    heapq.heapify(servers)
    runs: Dict[int, int] = {}
    for length in _lengths(size_elems, slice_size):
        load, server = servers[0]
        heapq.heapreplace(servers, (load + length, server))
        runs[server] = runs.get(server, 0) + length
    return list(runs.items())


def cut(runs: Sequence[Run], slice_size: int) -> Tuple[Slice, ...]:
    """Cuts a tensor into slices of at most `slice_size` elements.

    They go from server to server in turn, so that all links carry something from the first on.
    Whatever their size, each lies in the run of one server.
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
    """Returns the elements of each server when a tensor has come to those that it has."""
    loads = list(loads_elems)
    for server, length in runs:
        loads[server] += length
    return loads


def _lengths(size_elems: int, most: int) -> List[int]:
    """Full slices, which share buffers on a server, and one of what is left."""
    rest = size_elems % most
    return [most] * (size_elems // most) + ([rest] if rest else [])
