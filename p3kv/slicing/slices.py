"""A tensor cut into slices: the unit of sending, summing and updating (P3 section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class Slice:
    """A run of elements of one key's flattened tensor."""

    index: int
    offset: int
    length: int
    """Offset and length count elements."""
    server: int
    """Rank of the server that sums and keeps this slice."""


def num_slices(size_elems: int, slice_size: int) -> int:
    """How many slices a tensor of `size_elems` elements gives; an empty tensor gives none."""
    return -(-size_elems // slice_size)


def cut(size_elems: int, slice_size: int, first_server: int, num_servers: int) -> Tuple[Slice, ...]:
    """Cuts a tensor into slices of `slice_size` elements, the last one of what is left.

    Slices go to the servers round robin (P3 section 4.2), beginning with `first_server`, so
    that a key goes on where the one declared before it stopped.
    """
    return tuple(
        Slice(
            index=index,
            offset=index * slice_size,
            length=min(slice_size, size_elems - index * slice_size),
            server=(first_server + index) % num_servers,
        )
        for index in range(num_slices(size_elems, slice_size))
    )
