"""Placements that the thesis compares and p3kv does not have, for P3KV_PLUGINS.

Its third, the heuristic of its algorithm 2, gives each tensor to the server with the least load,
the largest tensor first. That is p3kv's `whole_tensors` for a job that declares its largest key
first.
"""

from __future__ import annotations

from typing import List, Sequence

from p3kv.slicing.placement import PLACEMENTS, Placement, Topology
from p3kv.slicing.slices import Layout, Run


class WholeRoundRobin(Placement):
    """Each tensor whole, on one server after the other: TensorFlow's default."""

    def __init__(self) -> None:
        self._next = 0

    def place(
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
    ) -> List[Run]:
        server, self._next = self._next, (self._next + 1) % len(loads_elems)
        return [(server, layout.size_elems)] if layout.size_elems else []


class UniformSplit(Placement):
    """Each tensor in equal parts, one on every server; parts differ by a grain at most."""

    def place(
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
    ) -> List[Run]:
        servers, grains = len(loads_elems), layout.size_elems // layout.grain_elems
        return [
            (server, len(range(server, grains, servers)) * layout.grain_elems)
            for server in range(min(servers, grains))
        ]


PLACEMENTS.register("whole_round_robin", WholeRoundRobin)
PLACEMENTS.register("uniform_split", UniformSplit)
