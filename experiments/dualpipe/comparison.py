"""Pipelines beside data parallelism: how long a batch takes, of what, and how many bytes travel.

Data parallelism is that of `p3kv.report.forecast`: a worker and a server on each host. The paper
shares a batch out among workers (section 4.3); users of p3kv rather give each worker a batch.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple

from experiments.dualpipe import plans
from experiments.dualpipe.partition import partition
from experiments.dualpipe.pipeline import batch_s
from experiments.dualpipe.plans import Plan
from p3kv.report.forecast import Model, Workload, bound, forecast

TITLES = {
    "dist_sync": "dist_sync, a batch shared out",
    "p3kv": "p3kv, a batch shared out",
    "p3kv_own": "p3kv, a batch for each worker",
    "pipedream_units": "PipeDream in time units",
    "pipedream": "PipeDream, 1F1B",
    "dualpipe": "DualPipe",
    "dualpipe_free": "DualPipe without time units",
}

HOSTS = 4
"""M is the wire time of data parallelism on so many hosts, each with a batch, as in figure 7."""


class Times(NamedTuple):
    """What the time of a batch consists of, in seconds, for the average worker.

    `imbalance_s`: it would also wait if links were infinitely fast. `transfer_s`: the rest of its
    waiting, which the paper divides into transfer and idle time that transfers cause.
    """

    compute_s: float
    transfer_s: float
    imbalance_s: float

    @property
    def batch_s(self) -> float:
        return sum(self)


def pipelines(workers: int) -> Dict[str, Plan]:
    """The plans that are compared, with enough batches for `pipeline.batch_s`."""
    batches = 14 * workers
    in_turn = plans.one_forward_one_backward(workers, batches)
    return {
        "pipedream_units": plans.in_units(in_turn),
        "pipedream": in_turn,
        "dualpipe": plans.dualpipe(workers, batches),
        "dualpipe_free": plans.one_forward_one_backward(workers, batches, ahead=2),
    }


def compare(model: Model, workers: int, ratio: float) -> Dict[str, Any]:
    """All systems on as many hosts as `workers`, on links at whose rate M is `ratio` times C."""
    link_bit_s = bound.link_for_ratio_bit_s(ratio, model.compute_s, model.size_bytes, HOSTS)
    rate_bytes_s = bound.payload_bytes_s(link_bit_s)
    stages = partition(model, workers, rate_bytes_s)
    times = _data_parallel(model, workers, link_bit_s)
    share_s = model.compute_s / workers
    for name, plan in pipelines(workers).items():
        alone_s = batch_s(plan, stages, math.inf)
        times[name] = Times(
            share_s, batch_s(plan, stages, rate_bytes_s) - alone_s, alone_s - share_s
        )
    return {
        "model": model.name,
        "workers": workers,
        "ratio": ratio,
        "compute_s": model.compute_s,
        "stages": [stage._asdict() for stage in stages],
        "data_parallel_bytes": 2 * (workers - 1) * model.size_bytes,
        "pipeline_bytes": 2 * sum(stage.activation_bytes for stage in stages),
        "systems": {
            name: {**of._asdict(), "speed_up": model.compute_s / of.batch_s}
            for name, of in times.items()
        },
    }


def _data_parallel(model: Model, workers: int, link_bit_s: float) -> Dict[str, Times]:
    arrays, forward_s, backward_s = model.workload
    shared = forecast(
        Workload(arrays, [s / workers for s in forward_s], [s / workers for s in backward_s]),
        workers,
        link_bit_s,
    )
    own = forecast(model.workload, workers, link_bit_s)
    share_s = model.compute_s / workers
    return {
        name: Times(share_s, seconds - share_s, 0.0)
        for name, seconds in (
            ("dist_sync", shared.dist_sync_s),
            ("p3kv", shared.p3kv_s),
            ("p3kv_own", own.p3kv_s / workers),
        )
    }


def staleness(workers: int) -> List[Dict[str, Any]]:
    """By worker, of a batch that meets a full pipeline: the updates between its two passes, beside
    the paper's s. One batch more than that is under way, whose activations the worker keeps."""
    found = pipelines(workers)
    batch = 7 * workers
    return [
        {
            "worker": worker,
            "equation_5": plans.version_difference(plans.FORWARD, worker, workers),
            "equation_6": plans.version_difference(plans.BACKWARD, worker, workers),
            "updates": {name: plans.staleness(plan, worker, batch) for name, plan in found.items()},
        }
        for worker in range(workers)
    ]
