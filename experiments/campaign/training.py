"""One training of a real network with p3kv, and what it has learned."""

from __future__ import annotations

from typing import Any, Dict, Sequence

from experiments.campaign.job import run_job
from experiments.cluster import Cluster
from experiments.emulation.systems import SYSTEMS
from experiments.training.encodings import Encoding
from experiments.training.tasks import TASKS, Recipe

WORKERS = 4
_EPOCH_TIMEOUT_S = 120.0


def train(
    cluster: Cluster,
    task: str,
    encoding: Encoding,
    seed: int,
    epochs: int,
    recipe: Recipe,
    flags: Sequence[str] = (),
) -> Dict[str, Any]:
    """Trains with four workers, as many on each host of `cluster`, and a server on each host.

    `flags` are more arguments of `experiments.training.worker`. On one host all travels over its
    loopback. Returns worker 0's numbers, by epoch: `epoch_s` without validating, `validated` the
    loss and the accuracy of other samples; and `sent_share` and `received_share`, its bytes by
    those of its gradients and weights. Raises RunFailed.
    """
    options = [f"--seed={seed}", f"--epochs={epochs}"]
    options += [f"--{name}={value}" for name, value in recipe._asdict().items()]
    job = run_job(
        cluster,
        SYSTEMS["p3kv"],
        ["experiments.training.worker", task, *options, *flags],
        120 + epochs * _EPOCH_TIMEOUT_S,
        encoding.environment(epochs * TASKS[task].steps(WORKERS)),
        per_host=WORKERS // len(cluster.hosts),
    )
    found = next(end for end in job.ends if end["rank"] == 0)
    return {
        "epoch_s": [round(seconds, 3) for seconds in found["epoch_s"]],
        "validated": [
            {name: round(value, 5) for name, value in one.items()} for one in found["validated"]
        ],
        **{name: round(found[name], 5) for name in ("sent_share", "received_share")},
    }
