"""Clusters that are too large to measure here, simulated with two plans of slices."""

from __future__ import annotations

import statistics
from typing import Dict, Iterator, NamedTuple

from experiments.campaign.campaign import point
from experiments.models import load
from p3kv.report.forecast.bound import lower_bound_s
from p3kv.report.forecast.simulator import EQUAL_PARTS, P3KV, Policy, cut, simulate

_SLICE_ELEMS = 50_000
"""At these rates p3kv has so many elements in a slice up to 8 hosts, and then fewer."""
_FEW_HOSTS = 8
_ITERATIONS, _WARM_UP = 5, 2


class Scaled(NamedTuple):
    """What a plan reaches on so many hosts: parts of linear scaling and of the bound."""

    plan: str
    of_linear: float
    of_bound: float
    frames: float
    """What a host sends in an iteration, as a worker and as a server."""


def scaled(model: str, hosts: int) -> Iterator[Scaled]:
    """Simulates each plan; every link has the rate at which M/C = 1 on four hosts."""
    workload = load(model).workload
    link_bit_s = point(model, 4, 1.0, 1.0, ["p3kv"], 1).rate_mbit_s * 1e6
    layers = (workload.layer_bytes, workload.forward_s, workload.backward_s)
    bound_s = lower_bound_s(*layers, hosts, link_bit_s)
    for plan, policy in _plans(hosts).items():
        times = simulate(workload, policy, hosts, link_bit_s, _ITERATIONS).iteration_s
        seconds = statistics.median(times[_WARM_UP:])
        # A worker sends each slice to its server, and a server each of its slices to all workers,
        # but for those of one host.
        frames = 2 * len(cut(workload, policy, hosts)) * (hosts - 1) / hosts
        yield Scaled(plan, workload.compute_s / seconds, bound_s / seconds, frames)


def _plans(hosts: int) -> Dict[str, Policy]:
    size = _SLICE_ELEMS if hosts <= _FEW_HOSTS else _SLICE_ELEMS * _FEW_HOSTS // hosts
    return {
        "p3kv": P3KV._replace(slice_elems=size),
        "equal parts": EQUAL_PARTS._replace(slice_elems=_SLICE_ELEMS),
    }
