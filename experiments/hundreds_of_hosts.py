"""Up to 256 hosts, simulated: what p3kv's slices cost there, and what equal parts would.

Every link has the rate at which M/C = 1 on four hosts. Frames are those that a host sends in an
iteration, as a worker and as a server.

python -m experiments.hundreds_of_hosts
"""

from __future__ import annotations

import argparse
import statistics
from typing import Optional, Sequence

from experiments.campaign.campaign import point
from experiments.models import load
from p3kv.forecast.bound import lower_bound_s
from p3kv.forecast.policies import EQUAL_PARTS, P3KV, Policy, Workload, cut
from p3kv.forecast.simulator import simulate

HOSTS = (4, 8, 16, 32, 64, 128, 256)
_SLICE_ELEMS = 50_000
"""At these rates p3kv has so many elements in a slice up to 8 hosts, and then fewer."""
_FEW_HOSTS = 8
_ITERATIONS, _WARM_UP = 5, 2


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument("--hosts", nargs="+", type=int, default=HOSTS, metavar="N")
    chosen = parser.parse_args(argv)
    workload = load(chosen.model).workload
    link_bit_s = point(chosen.model, 4, 1.0, 1.0, ["p3kv"], 1).rate_mbit_s * 1e6
    print(f"{'hosts':>5}  {'plan':12}{'of linear':>10}{'of the bound':>14}{'frames':>9}")
    for hosts in chosen.hosts:
        for title, policy in _plans(hosts).items():
            times = simulate(workload, policy, hosts, link_bit_s, _ITERATIONS).iteration_s
            seconds = statistics.median(times[_WARM_UP:])
            layers = (workload.layer_bytes, workload.forward_s, workload.backward_s)
            bound_s = lower_bound_s(*layers, hosts, link_bit_s)
            print(
                f"{hosts:>5}  {title:12}{workload.compute_s / seconds:>10.3f}"
                f"{bound_s / seconds:>14.3f}{_frames(workload, policy, hosts):>9.0f}",
                flush=True,
            )


def _plans(hosts: int) -> dict[str, Policy]:
    size = _SLICE_ELEMS if hosts <= _FEW_HOSTS else _SLICE_ELEMS * _FEW_HOSTS // hosts
    return {
        "p3kv": P3KV._replace(slice_elems=size),
        "equal parts": EQUAL_PARTS._replace(slice_elems=_SLICE_ELEMS),
    }


def _frames(workload: Workload, policy: Policy, hosts: int) -> float:
    """A worker sends each slice to its server, and a server each of its slices to all workers, but
    for those of one host."""
    slices = len(cut(workload, policy, hosts))
    return 2 * slices * (hosts - 1) / hosts


if __name__ == "__main__":
    main()
