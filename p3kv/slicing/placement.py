"""Placements: rules that say which server keeps which elements, each chosen by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import List, Sequence, Tuple

from p3kv.common.registry import Registry
from p3kv.slicing.layout import Layout
from p3kv.slicing.slices import Run, balanced_runs
from p3kv.slicing.topology import Topology


class Placement(ABC):
    """Decides where a job's tensors are kept.

    The scheduler makes one object, without arguments, for each job. So an object may remember what
    it has placed. All calls come from one thread.
    """

    @abstractmethod
    def place(
        self,
        layout: Layout,
        slice_size: int,
        loads_elems: Sequence[int],
        topology: Topology,
    ) -> List[Run]:
        """Returns a tensor's runs: which server keeps how many of its elements, in their order.

        Called once for each key, in the order in which workers declare them. `layout` has the
        tensor's shape, its `size_elems` and its `grain_elems`. `slice_size` is how many elements a
        full slice of this tensor has now; it may change, and the runs stay. A tensor that must be
        whole is placed as one slice, which is as large as the tensor. Servers are named by
        rank: `loads_elems` are the elements that each keeps already, and `topology.servers` says
        where it runs. Each server may have one run. Runs are not empty and have whole grains, and
        together they have all elements; a tensor without elements has no runs.
        """


class ByLink(Placement):
    """Placement like `Balanced`, but servers whose hosts' links have more time for it keep more.

    The same where all hosts have a worker, a server and equal links.
    """

    def place(
        self,
        layout: Layout,
        slice_size: int,
        loads_elems: Sequence[int],
        topology: Topology,
    ) -> List[Run]:
        return balanced_runs(layout.size_elems, slice_size, loads_elems, topology.shares)


class Balanced(Placement):
    """Each slice on the server with the fewest elements: no server keeps over one slice more."""

    def place(
        self,
        layout: Layout,
        slice_size: int,
        loads_elems: Sequence[int],
        topology: Topology,
    ) -> List[Run]:
        return balanced_runs(layout.size_elems, slice_size, loads_elems)


class RoundRobin(Placement):
    """Slices on one server after the other, whatever each keeps; continues from key to key.

    P3 section 4.2. A slice with few elements takes a turn like a full one, so loads differ more
    than with `Balanced`.
    """

    def __init__(self) -> None:
        self._next = 0

    def place(
        self,
        layout: Layout,
        slice_size: int,
        loads_elems: Sequence[int],
        topology: Topology,
    ) -> List[Run]:
        servers, slices = len(loads_elems), -(-layout.size_elems // slice_size)
        first, self._next = self._next, (self._next + slices) % len(loads_elems)
        runs = []
        for turn in range(min(slices, servers)):
            # The slices `turn`, `turn` + `servers` and so on; only the last of all may be smaller.
            length = len(range(turn, slices, servers)) * slice_size
            if turn == (slices - 1) % servers:
                length -= slices * slice_size - layout.size_elems
            runs.append(((first + turn) % servers, length))
        return runs


class WholeTensors(Placement):
    """Every tensor whole, on the server that has the fewest elements when it is declared.

    Departs from Algorithm 2 of P.-Y. Wu, "Versatile Communication Optimization for Deep Learning by
    Modularized Parameter Server" (section 2.3.1), which sorts all tensors and places the largest
    first. That needs all of them at once, and here keys are declared one by one: a worker uses a
    key before it declares the next, at any time in a training. So loads depend on the order of
    declaration, and a large tensor that comes last may leave one server with much more.
    """

    def place(
        self,
        layout: Layout,
        slice_size: int,
        loads_elems: Sequence[int],
        topology: Topology,
    ) -> List[Run]:
        least = min(range(len(loads_elems)), key=lambda server: loads_elems[server])
        return [(least, layout.size_elems)] if layout.size_elems else []


PLACEMENTS: Registry[Placement] = Registry(
    "placement",
    "the scheduler",
    "P3KV_PLACEMENT",
    balanced=Balanced,
    by_link=ByLink,
    round_robin=RoundRobin,
    whole_tensors=WholeTensors,
)
"""Placements by name."""


def checked(runs: Sequence[Run], layout: Layout, servers: int, whole: bool = False) -> List[Run]:
    """A tensor's runs, as a placement has returned them; ValueError where they can't be right.

    `whole`: they must all be on one server.
    """
    found: List[Tuple[int, int]] = [(int(server), int(length)) for server, length in runs]
    ranks = {server for server, _ in found}
    if len(ranks) < len(found) or not ranks <= set(range(servers)):
        raise ValueError(f"{found} must name some of {servers} servers, and each once")
    if min((length for _, length in found), default=1) < 1:
        raise ValueError(f"{found} has a run without elements")
    if sum(length for _, length in found) != layout.size_elems:
        raise ValueError(f"{found} must have {layout.size_elems} elements together")
    if whole and len(found) > 1:
        raise ValueError(
            f"{found} must be one run, because the optimizer needs the whole tensor on one server: "
            "it is to be placed as one slice"
        )
    if not layout.has_whole_grains(found):
        raise ValueError(
            f"{found} breaks a grain: every run must be a multiple of {layout.grain_elems} elements"
        )
    return found
