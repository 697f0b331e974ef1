"""A placement of a user's own: weights in equal parts on all servers, biases on the last one."""

from typing import List, Sequence

from p3kv.slicing.placement import PLACEMENTS, Placement


class BiasesLast(Placement):
    """Takes for a bias what fits into one slice."""

    def place(
        self,
        size_elems: int,
        slice_size: int,
        loads_elems: Sequence[int],
        hosts: Sequence[str],
    ) -> List[tuple]:
        servers = len(loads_elems)
        if size_elems <= slice_size:
            return [(servers - 1, size_elems)] if size_elems else []
        ends = [size_elems * server // servers for server in range(servers + 1)]
        return [(server, ends[server + 1] - ends[server]) for server in range(servers)]


PLACEMENTS.register("biases_last", BiasesLast)
