"""Placements: rules that say which server keeps which elements, each chosen by its name."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import DefaultDict, Dict, List, Mapping, Sequence, Tuple

from p3kv.common.registry import Registry
from p3kv.slicing.slices import Layout, Run, balanced_runs

_SLOWER = 0.7
"""A link is taken for slower if it carried less than this part of what the fastest one did, and so
did flows over it by their other end's fastest: a quarter of a second measures no better."""
_UNLIKE = 0.8
"""And this part of the median of links of hosts like its own: sums of flows are steadier."""
_HALVINGS = 60


@dataclass(frozen=True)
class Topology:
    """The hosts of a job's servers and workers, by rank, and the rates of these hosts' links.

    A host has one full-duplex link. `rates` are by host, in any unit; a host that is not there has
    a link as fast as the fastest. Workers that send one sum for their host are here as one.
    """

    servers: Tuple[str, ...]
    workers: Tuple[str, ...]
    rates: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def shares(self) -> List[float]:
        """The part of all elements that each server should keep, so that no link takes long.

        In an iteration a worker sends its gradients to the servers that are not on its host, and
        each server sends its values to the workers that are not on its own. So of a model of one
        byte, the link of a host with w of n workers, whose servers keep a part x, carries
        w (1 - x) + x (n - w) bytes in each direction. Sought is the least time in which all links
        carry theirs: a host keeps at most what its link carries in that time, and all hosts
        together keep everything. For equal links this is theorem 1 of Y. Jiang et al., "A Unified
        Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters"
        (OSDI'20). Servers of one host have equal parts.
        """
        parts = self._parts
        servers_on = Counter(self.servers)
        return [parts[host] / servers_on[host] for host in self.servers]

    @property
    def is_even(self) -> bool:
        """Whether all hosts have as many workers and servers as each other, and links as fast."""
        servers_on, workers_on = Counter(self.servers), Counter(self.workers)
        numbers = {(servers_on[host], workers_on[host]) for host in servers_on | workers_on}
        return len(numbers) == 1 and len(set(self.rates.values())) <= 1

    @property
    def busy(self) -> float:
        """Time for which the busiest link is busy in an iteration, for a model of one byte, in the
        rates' unit of time."""
        workers_on, count = Counter(self.workers), len(self.workers)
        fastest = max(self.rates.values(), default=1.0)
        return max(
            (workers_on[host] + self._parts.get(host, 0.0) * (count - 2 * workers_on[host]))
            / self.rates.get(host, fastest)
            for host in {*self.servers, *self.workers}
        )

    def with_servers_beside_workers(self) -> Topology:
        """The same with one more server on each host that has workers and no server."""
        without = sorted({*self.workers}.difference(self.servers))
        return replace(self, servers=(*self.servers, *without))

    @cached_property
    def _parts(self) -> Dict[str, float]:
        """Part that the servers of each host that has some keep together."""
        hosts, workers_on, count = set(self.servers), Counter(self.workers), len(self.workers)
        for host in hosts:
            if 2 * workers_on[host] > count:
                # Whatever another host kept, all links would carry more.
                return {other: float(other == host) for other in hosts}
        fastest = max(self.rates.values(), default=1.0)

        def most(host: str, time: float) -> float:
            """The largest part that the host can keep if its link is busy for this time."""
            left = time * self.rates.get(host, fastest) - workers_on[host]
            growth = count - 2 * workers_on[host]
            if left < 0:
                return 0.0
            return min(1.0, left / growth) if growth > 0 else 1.0

        least = max(
            (number / self.rates.get(host, fastest) for host, number in workers_on.items()),
            default=0.0,
        )
        slowest = min((self.rates.get(host, fastest) for host in hosts), default=fastest)
        low, high = least, least + count / slowest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if sum(most(host, middle) for host in hosts) < 1:
                low = middle
            else:
                high = middle
        parts = {host: most(host, high) for host in hosts}
        together = sum(parts.values())
        return {host: part / together for host, part in parts.items()}


def link_rates(
    servers: Sequence[str], workers: Sequence[str], flows: Sequence[Sequence[float]]
) -> Dict[str, float]:
    """The rates of hosts' links, from rates at which all workers sent to all servers and back.

    `flows` has a row for each worker and in it a number for each server, in bytes a second, all
    measured at the same time. A flow does not tell which of its two links has held it up. A link
    is slower if it carried less, and most of its flows are slower than the fastest one at their
    other end. It must also have carried less than most links of hosts with as many workers and
    servers. The other links count as equal: where servers have hosts of their own, these hosts'
    links were not full, and flows to hosts with workers are slower because these were.
    """
    carried: DefaultDict[str, float] = defaultdict(float)
    ends: DefaultDict[str, List[Tuple[str, float]]] = defaultdict(list)
    for worker, row in zip(workers, flows):
        for server, rate in zip(servers, row):
            if worker != server:
                for here, there in ((worker, server), (server, worker)):
                    carried[here] += rate
                    ends[here].append((there, rate))
    if not carried or min(carried.values()) <= 0:
        return {}
    fastest = max(carried.values())
    alike: DefaultDict[Tuple[int, int], List[float]] = defaultdict(list)
    for host, rate in carried.items():
        alike[servers.count(host), workers.count(host)].append(rate)
    rates = {}
    for host, flows_here in ends.items():
        compared = [rate / max(other for _, other in ends[there]) for there, rate in flows_here]
        peers = alike[servers.count(host), workers.count(host)]
        is_slower = max(statistics.median(compared), carried[host] / fastest) < _SLOWER and (
            len(peers) == 1 or carried[host] < _UNLIKE * statistics.median_high(peers)
        )
        rates[host] = carried[host] if is_slower else fastest
    return rates


class Placement(ABC):
    """Decides where a job's tensors are kept.

    The scheduler makes one object, without arguments, for each job. So an object may remember what
    it has placed. All calls come from one thread.
    """

    @abstractmethod
    def place(
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
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
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
    ) -> List[Run]:
        return balanced_runs(
            layout.size_elems, slice_size, loads_elems, topology.shares, layout.grain_elems
        )


class Balanced(Placement):
    """Each slice on the server with the fewest elements: no server keeps over one slice more."""

    def place(
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
    ) -> List[Run]:
        return balanced_runs(
            layout.size_elems, slice_size, loads_elems, grain_elems=layout.grain_elems
        )


class RoundRobin(Placement):
    """Slices on one server after the other, whatever each keeps; continues from key to key.

    P3 section 4.2. A slice with few elements takes a turn like a full one, so loads differ more
    than with `Balanced`.
    """

    def __init__(self) -> None:
        self._next = 0

    def place(
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
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
        self, layout: Layout, slice_size: int, loads_elems: Sequence[int], topology: Topology
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
    """Check a placement's runs; ValueError where they can't be right. `whole`: all on one
    server."""
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
