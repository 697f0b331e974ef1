"""One measured run: a system trains an emulated model on a throttled cluster."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, ContextManager, Dict, List, Optional

from experiments.campaign.job import run_job
from experiments.cluster import Cluster
from experiments.emulation.plain_layers import layers_as_text
from experiments.emulation.systems import SYSTEMS
from experiments.models import load


@dataclass
class Run:
    """What was measured: times are of the slowest worker, iteration by iteration."""

    system: str
    model: str
    hosts: int
    rate_mbit_s: Optional[float]
    dilation: float
    compute_s: float
    """C: computation of one iteration, dilated, in seconds."""
    iteration_s: List[float]
    total_s: float
    """Time in which the slowest worker has made all these iterations. Where workers do not wait for
    each other, it is less than the sum of the slowest iterations."""
    cpu_s: float
    """Processor time of all processes during the measured iterations."""
    worker_rss_kib: int
    """The most memory that a worker has held."""
    arrays_rss_kib: int
    """What it held when it had its arrays and no store yet."""
    server_rss_kib: int
    """The most memory that a server has held; 0 without servers."""
    versions: Dict[str, str] = field(default_factory=dict)
    """Of what workers have used and this process has not."""
    spans: Dict[int, List[Dict[str, Any]]] = field(default_factory=dict)
    """By worker: what the emulated accelerator did, if asked for."""

    @property
    def median_s(self) -> float:
        """The median iteration."""
        return statistics.median(self.iteration_s)

    @property
    def efficiency(self) -> float:
        """C by the median iteration; 1 is as fast as without any communication."""
        return self.compute_s / self.median_s


def measure(
    cluster: Cluster,
    system: str,
    model: str,
    dilation: float = 1.0,
    warm_up: int = 2,
    iterations: int = 5,
    timeout_s: float = 300.0,
    spans: bool = False,
    during: Optional[ContextManager[object]] = None,
    workers: Optional[int] = None,
    per_host: int = 1,
    **settings: object,
) -> Run:
    """Runs `system` on all hosts of `cluster`, each a worker and, if it has servers, a server.

    `during`, `workers`, `per_host`, `settings` and what is raised are those of
    `experiments.campaign.job.run_job`.
    """
    arguments = [model, system, f"--dilation={dilation}", f"--warm-up={warm_up}"]
    arguments += [f"--iterations={iterations}", *(["--spans"] if spans else [])]
    worker = "experiments.emulation.emulated_worker"
    if SYSTEMS[system].in_torch:
        # Without MXNet a worker can't make the model: it is told it.
        arguments[0] = layers_as_text(load(model))
        worker = "experiments.emulation.torch_worker"
    job = run_job(
        cluster,
        SYSTEMS[system],
        [worker, *arguments],
        timeout_s,
        settings,
        during,
        workers,
        per_host,
    )
    by_rank = {end["rank"]: end for end in job.ends}
    return Run(
        system=system,
        model=model,
        hosts=len(cluster.hosts),
        rate_mbit_s=cluster.hosts[0].rate_mbit_s,
        dilation=dilation,
        compute_s=job.ends[0]["compute_s"],
        iteration_s=[max(times) for times in zip(*(end["iteration_s"] for end in job.ends))],
        total_s=max(sum(end["iteration_s"]) for end in job.ends),
        cpu_s=job.cpu_s,
        worker_rss_kib=max(end["max_rss_kib"] for end in job.ends),
        arrays_rss_kib=min(end["arrays_rss_kib"] for end in job.ends),
        server_rss_kib=job.server_rss_kib,
        versions=job.ends[0]["versions"],
        spans={rank: end["spans"] for rank, end in by_rank.items()} if spans else {},
    )
