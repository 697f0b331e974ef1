"""Runs that tell what synchronising costs: whole rounds of a store, and `Trainer.step` alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Dict, NamedTuple

from experiments.campaign.campaign import DILATION, point
from experiments.campaign.job import run_job
from experiments.campaign.measure import measure
from experiments.cluster import Cluster
from experiments.emulation.systems import SYSTEMS

STEPS = ("pending_step_s", "ready_step_s")
"""`Trainer.step` while backward goes on, and when all gradients are ready."""
_LIMITED_ITERATIONS = 4
_ADAPTED = 9
"""After so many steps p3kv's slices have the size that they keep."""


class Case(NamedTuple):
    """A model that is synchronised, and in how many measured rounds."""

    model: str
    rounds: int


def run_rounds(cluster: Cluster, case: Case, system: str) -> Dict[str, Any]:
    """Measures whole rounds of `system`. Raises RunFailed."""
    result = measure(cluster, system, case.model, iterations=case.rounds)
    return {
        "model": case.model,
        "system": system,
        "hosts": result.hosts,
        "iteration_s": [round(seconds, 6) for seconds in result.iteration_s],
        "cpu_s": round(result.cpu_s, 2),
        "worker_rss_kib": result.worker_rss_kib,
        "arrays_rss_kib": result.arrays_rss_kib,
        "server_rss_kib": result.server_rss_kib,
        "idle_server_rss_kib": _idle_server_rss_kib(),
    }


def run_limited(hosts: int, ratio: float, system: str) -> Dict[str, Any]:
    """Measures iterations of ResNet-50 on links at whose rate M is `ratio` times C, when `system`
    has had time to adapt to them. Raises RunFailed."""
    at = point("resnet50", hosts, ratio, DILATION["resnet50"], [system], _LIMITED_ITERATIONS)
    with Cluster(hosts, at.rate_mbit_s) as cluster:
        result = measure(
            cluster, system, at.model, at.dilation, _ADAPTED, _LIMITED_ITERATIONS, timeout_s=600.0
        )
    return {
        "model": at.model,
        "ratio": ratio,
        "system": system,
        "hosts": hosts,
        "rate_mbit_s": at.rate_mbit_s,
        "dilation": at.dilation,
        "iteration_s": [round(seconds, 6) for seconds in result.iteration_s],
        "cpu_s": round(result.cpu_s, 2),
    }


def run_steps(cluster: Cluster, system: str) -> Dict[str, Any]:
    """Measures what `Trainer.step` takes of a script's time. Raises RunFailed."""
    job = run_job(
        cluster, SYSTEMS[system], ["experiments.emulation.step_worker", system], 300.0, {}
    )
    return {
        "model": "resnet50",
        "system": system,
        "hosts": len(cluster.hosts),
        "parameters": job.ends[0]["parameters"],
        **{name: [round(seconds, 6) for seconds in job.ends[0][name]] for name in STEPS},
    }


def _idle_server_rss_kib() -> int:
    """What a process holds that has imported what a server imports."""
    code = (
        "import p3kv.server.server, mxnet, p3kv.frontends.mxnet.server_optimizer\n"
        "status = open('/proc/self/status').read().split()\n"
        "print(status[status.index('VmRSS:') + 1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)
