"""A tensor cut into slices: the unit of sending, summing and updating (P3 section 4.2)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import List, Sequence, Tuple


@dataclass(frozen=True)
class Slice:
    """A run of elements of one key's flattened tensor."""

    index: int
    offset: int
    length: int
    """Offset and length count elements."""
    server: int
    """Rank of the server that sums and keeps this slice."""


def cut(size_elems: int, slice_size: int, loads_elems: Sequence[int]) -> Tuple[Slice, ...]:
    """Cuts a tensor into slices of `slice_size` elements, the last one of what is left.

    `loads_elems` are the elements that each server keeps already. Each slice goes to the server
    that has the fewest, the first among equals. Full slices so go round robin, as in P3 section
    4.2, but a bias does not count like a full slice, and no server has more than one slice above
    the mean: an iteration takes as long as the link of the fullest.
    """
    servers = [(load, server) for server, load in enumerate(loads_elems)]
    heapq.heapify(servers)
    slices = []
    for index, offset in enumerate(range(0, size_elems, slice_size)):
        length = min(slice_size, size_elems - offset)
        load, server = servers[0]
        heapq.heapreplace(servers, (load + length, server))
        slices.append(Slice(index, offset, length, server))
    return tuple(slices)


def loads_with(loads_elems: Sequence[int], slices: Sequence[Slice]) -> List[int]:
    """Returns the elements of each server when `slices` have come to those that it has."""
    loads = list(loads_elems)
    for piece in slices:
        loads[piece.server] += piece.length
    return loads
