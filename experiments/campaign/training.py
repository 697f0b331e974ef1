"""One training of a real network with p3kv, and what it has learned."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from experiments.campaign.job import run_job
from experiments.cluster import Cluster
from experiments.emulation.systems import SYSTEMS
from experiments.training.encodings import Encoding
from experiments.training.rules import Rule
from experiments.training.tasks import TASKS, Recipe

WORKERS = 4
_EPOCH_TIMEOUT_S = 120.0
_STALE_TIMEOUT_S = 1200.0


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
    options = _options({"seed": seed, "epochs": epochs, **recipe._asdict()})
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


def train_stale(
    task: str, rule: Rule, staleness: int, seed: int, steps: int, validations: int, recipe: Recipe
) -> Dict[str, Any]:
    """Trains with a worker and a server on one host, by a rule that gives the worker weights of so
    many rounds ago; with Adam where the recipe has no momentum.

    Returns for each step the worker's loss (`losses`), how far its weights were from the servers'
    (`errors`), and how far those of `staleness` steps ago were (`stale_errors`): root-mean-square
    errors. `validated` has the loss and the accuracy of other samples, by the servers' weights, so
    many times. Raises RunFailed.
    """
    given = {"seed": seed, "steps": steps, "staleness": staleness, "validations": validations}
    command = ["experiments.training.stale_worker", task, *_options({**given, **recipe._asdict()})]
    settings = {"P3KV_CONSISTENCY": rule.setting(staleness)}
    with Cluster(1) as cluster:
        (end,) = run_job(cluster, SYSTEMS["p3kv"], command, _STALE_TIMEOUT_S, settings).ends
    return {name: end[name] for name in ("losses", "errors", "stale_errors", "validated")}


def _options(given: Mapping[str, float]) -> List[str]:
    return [f"--{name}={value}" for name, value in given.items()]
