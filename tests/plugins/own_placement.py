"""A placement of a user's own: weights in equal parts on all servers, biases on the last one."""

from typing import List, Sequence

from p3kv.slicing import Topology
from p3kv.slicing.placement import PLACEMENTS, Placement
from p3kv.slicing.slices import Layout


class BiasesLast(Placement):
    """Takes for a bias what fits into one slice."""

    def place(
        self,
        layout: Layout,
        slice_size: int,
        loads_elems: Sequence[int],
        topology: Topology,
    ) -> List[tuple]:
        servers = len(loads_elems)
        if layout.size_elems <= slice_size:
            return [(servers - 1, layout.size_elems)] if layout.size_elems else []
        grain, grains = layout.grain_elems, layout.size_elems // layout.grain_elems
        ends = [grains * server // servers * grain for server in range(servers + 1)]
        runs = [(server, ends[server + 1] - ends[server]) for server in range(servers)]
        return [(server, length) for server, length in runs if length]


PLACEMENTS.register("biases_last", BiasesLast)
