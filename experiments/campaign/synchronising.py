"""What synchronising costs: whole rounds of a store, iterations behind slow links, round trips of
small keys and of a large one, steps of small transformers, and `Trainer.step` alone. Each kind of
case makes its own hosts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Dict, NamedTuple, Sequence

from experiments.campaign.campaign import DILATION, point
from experiments.campaign.job import run_job
from experiments.campaign.measure import measure
from experiments.cluster import Cluster
from experiments.emulation.systems import SYSTEMS

HOSTS = 4
STEPS = ("pending_step_s", "ready_step_s")
"""`Trainer.step` while backward goes on, and when all gradients are ready."""
_LIMITED_ITERATIONS = 4
IN_MXNET = ("dist_sync", "p3kv")
"""The systems of most cases; the peer comes first."""
_ADAPTED = 9
"""After so many steps p3kv's slices have the size that they keep."""


class Rounds(NamedTuple):
    """A model whose gradients are all ready at once, on links without a limit."""

    model: str
    rounds: int
    systems: Sequence[str] = IN_MXNET

    @property
    def title(self) -> str:
        return self.model

    def run(self, system: str) -> Dict[str, Any]:
        """Measures whole rounds of `system`. Raises RunFailed."""
        with Cluster(HOSTS) as cluster:
            result = measure(cluster, system, self.model, iterations=self.rounds)
        return {
            "model": self.model,
            "system": system,
            "hosts": result.hosts,
            "iteration_s": _rounded(result.iteration_s),
            "cpu_s": round(result.cpu_s, 2),
            "worker_rss_kib": result.worker_rss_kib,
            "arrays_rss_kib": result.arrays_rss_kib,
            "server_rss_kib": result.server_rss_kib,
            "idle_server_rss_kib": _idle_server_rss_kib(),
        }


class Limited(NamedTuple):
    """ResNet-50 on links at whose rate M is `ratio` times C."""

    ratio: float
    systems: Sequence[str] = IN_MXNET

    @property
    def title(self) -> str:
        return f"ResNet-50, M/C = {self.ratio:g}"

    def run(self, system: str) -> Dict[str, Any]:
        """Measures iterations, when `system` has had time to adapt. Raises RunFailed."""
        at = point(
            "resnet50", HOSTS, self.ratio, DILATION["resnet50"], [system], _LIMITED_ITERATIONS
        )
        with Cluster(HOSTS, at.rate_mbit_s) as cluster:
            result = measure(
                cluster, system, at.model, at.dilation, _ADAPTED, _LIMITED_ITERATIONS, 600.0
            )
        return {
            "model": at.model,
            "ratio": self.ratio,
            "system": system,
            "hosts": HOSTS,
            "rate_mbit_s": at.rate_mbit_s,
            "dilation": at.dilation,
            "iteration_s": _rounded(result.iteration_s),
            "cpu_s": round(result.cpu_s, 2),
        }


class Small(NamedTuple):
    """A few keys of so many elements each, on hosts that each have a worker and a server: what a
    round trip takes is latency."""

    hosts: int
    keys: int
    elements: int
    rounds: int
    systems: Sequence[str] = IN_MXNET

    @property
    def title(self) -> str:
        keys = "1 key" if self.keys == 1 else f"{self.keys} keys"
        elements = "1 element" if self.elements == 1 else f"{self.elements:,} elements"
        return f"{keys} of {elements}"

    def run(self, system: str) -> Dict[str, Any]:
        """Measures round trips, by the slowest worker. Raises RunFailed."""
        numbers = [str(number) for number in (self.keys, self.elements, self.rounds)]
        worker = ["experiments.emulation.small_worker", system, *numbers]
        with Cluster(self.hosts) as cluster:
            job = run_job(cluster, SYSTEMS[system], worker, 300.0, {})
        slowest_s = [max(of_one) for of_one in zip(*(end["iteration_s"] for end in job.ends))]
        return {
            "case": self.title,
            "system": system,
            "hosts": self.hosts,
            "round_trip_s": _rounded(slowest_s),
        }


class Loopback(NamedTuple):
    """A large key of one worker and one server on one host: there is no link."""

    elements: int = 50_000_000
    rounds: int = 10
    systems: Sequence[str] = IN_MXNET

    @property
    def title(self) -> str:
        return f"{4 * self.elements // 10**6} MB, loopback"

    def run(self, system: str) -> Dict[str, Any]:
        """Measures round trips. Raises RunFailed."""
        numbers = ["1", str(self.elements), str(self.rounds), "--warm-up", "3"]
        worker = ["experiments.emulation.small_worker", system, *numbers]
        with Cluster(1) as cluster:
            job = run_job(cluster, SYSTEMS[system], worker, 300.0, {})
        return {
            "case": self.title,
            "system": system,
            "hosts": 1,
            "size_bytes": 4 * self.elements,
            "trip_s": _rounded(job.ends[0]["iteration_s"]),
            "cpu_s": round(job.cpu_s, 2),
        }


class Blocks(NamedTuple):
    """AdamW of a transformer of small tensors, 12 in each block, in two ranks of one host."""

    blocks: int
    width: int
    steps: int
    systems: Sequence[str] = ("ddp_25mb", "p3kv_torch", "torch_alone")

    @property
    def title(self) -> str:
        return f"{12 * self.blocks} tensors, AdamW"

    def run(self, system: str) -> Dict[str, Any]:
        """Measures steps, by the slower rank. Raises RunFailed."""
        ranks = 1 if SYSTEMS[system].store == "none" else 2
        numbers = [str(number) for number in (self.blocks, self.width, self.steps)]
        worker = ["experiments.emulation.blocks_worker", system, *numbers]
        with Cluster(1) as cluster:
            job = run_job(cluster, SYSTEMS[system], worker, 300.0, {}, per_host=ranks)
        slowest_s = [max(of_one) for of_one in zip(*(end["step_s"] for end in job.ends))]
        return {
            "case": self.title,
            "system": system,
            "hosts": 1,
            "tensors": job.ends[0]["tensors"],
            "step_s": _rounded(slowest_s),
            "cpu_s": round(job.cpu_s, 2),
        }


class Step(NamedTuple):
    """gluon's `Trainer.step` of ResNet-50 on one host."""

    title: str = "Trainer.step"
    systems: Sequence[str] = IN_MXNET

    def run(self, system: str) -> Dict[str, Any]:
        """Measures what it takes of a script's time. Raises RunFailed."""
        worker = ["experiments.emulation.step_worker", system]
        with Cluster(1) as cluster:
            job = run_job(cluster, SYSTEMS[system], worker, 300.0, {})
        return {
            "model": "resnet50",
            "system": system,
            "hosts": 1,
            "parameters": job.ends[0]["parameters"],
            **{name: _rounded(job.ends[0][name]) for name in STEPS},
        }


def _rounded(seconds: Sequence[float]) -> Sequence[float]:
    return [round(one, 6) for one in seconds]


def _idle_server_rss_kib() -> int:
    """What a process holds that has imported what a server imports."""
    code = (
        "import p3kv.server.server, mxnet, p3kv.frontends.mxnet.optimizers.server_optimizer\n"
        "status = open('/proc/self/status').read().split()\n"
        "print(status[status.index('VmRSS:') + 1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)
