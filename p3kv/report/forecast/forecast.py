"""How long an iteration takes with each store, for one model on one network."""

from __future__ import annotations

import statistics
from typing import NamedTuple, Optional

from p3kv.report.forecast.bound import TCP_PAYLOAD, ideal_fifo_s, lower_bound_s, payload_bytes_s
from p3kv.report.forecast.simulator import BASELINE, P3KV, Policy, Workload, simulate
from p3kv.slicing import slice_size_for

DIST_SYNC, DDP = FRAMEWORKS_OWN = ("dist_sync", "DDP")
"""What the frameworks have themselves, as `Forecast.own_s` knows it."""
_ITERATIONS = 5
_WARM_UP = 2
"""The first iteration finds its parameters there, and the second one follows it."""
_MOST_SLICES = 1000
"""More and smaller slices change nothing, and take long to simulate."""
MOST_HOSTS_EACH = 8
"""Up to so many hosts, each is simulated for stores whose servers are not balanced."""


class Forecast(NamedTuple):
    """Seconds of an iteration, each C at least. In all, processors cost nothing.

    `bound_s`: no order of sending is faster. `p3kv_s`, `fifo_s`, `dist_sync_s`: simulated, with
    p3kv, with p3kv's slices first in, first out (P3KV_PRIORITIES=0), and with the framework's
    synchronous store (dist_sync), which sends whole arrays. `perfect_fifo_s`: the least that first
    in, first out can take, as DistributedDataParallel (DDP) sends its buckets.
    """

    compute_s: float
    bound_s: float
    p3kv_s: float
    fifo_s: float
    dist_sync_s: float
    perfect_fifo_s: float

    def own_s(self, own: str) -> float:
        """Seconds of an iteration with what a framework has itself, one of `FRAMEWORKS_OWN`."""
        return self.perfect_fifo_s if own == DDP else self.dist_sync_s


def forecast(
    workload: Workload,
    hosts: int,
    link_bit_s: float,
    payload: float = TCP_PAYLOAD,
    slice_elems: Optional[int] = None,
) -> Forecast:
    """Forecasts an iteration's time on `hosts` hosts, each a worker and a server behind one link.

    `link_bit_s` is the link's rate in each direction, of which `payload` carries elements; 1.0
    where the rate is a measured one of elements. `slice_elems`: by default what p3kv would choose.

    Where servers are balanced, one host stands for all, so a forecast takes tenths of a second of
    computing, whatever the number of hosts. ValueError without a host or a rate.
    """
    if hosts < 1 or link_bit_s <= 0:
        raise ValueError(f"no forecast for {hosts} hosts and {link_bit_s} bit/s")
    if slice_elems is None:
        slice_elems = slice_size_for(payload_bytes_s(link_bit_s, payload), hosts)
    all_elems = sum(elems for layer in workload.arrays for _, elems in layer)
    slices = P3KV._replace(slice_elems=max(slice_elems, all_elems // _MOST_SLICES))

    def iteration_s(policy: Policy, balanced: bool) -> float:
        times = simulate(
            workload, policy, hosts, link_bit_s, _ITERATIONS, payload,
            symmetric=balanced or hosts > MOST_HOSTS_EACH,
        ).iteration_s  # fmt: skip
        return statistics.median(times[_WARM_UP:])

    network = (hosts, link_bit_s, payload)
    layers = (workload.layer_bytes, workload.forward_s, workload.backward_s)
    return Forecast(
        compute_s=workload.compute_s,
        bound_s=lower_bound_s(*layers, *network),
        p3kv_s=iteration_s(slices, True),
        fifo_s=iteration_s(slices._replace(priority=False), True),
        dist_sync_s=iteration_s(BASELINE, False),
        perfect_fifo_s=ideal_fifo_s(*layers, *network),
    )
