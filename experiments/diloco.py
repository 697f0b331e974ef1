"""DiLoCo's trade: what trained networks are worth at the end, by how many bytes were sent.

Workers make H steps by themselves between two exchanges. Two networks on real data, from the same
first weights and with the same batches for each seed.

python -m experiments.diloco
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import WORKERS, train
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_sent_bytes import draw, summarize, table_text
from experiments.training.encodings import LOCAL
from experiments.training.tasks import TASKS

SEEDS = 3
_ABOUT = {
    "figure": "loss and accuracy of two trained networks, by the bytes that workers have sent",
    "computation": f"real: {WORKERS} workers and a server on one host, over its loopback",
    "units": "validated: after each epoch, of samples that nobody trains with, the loss in nats "
    "and the share of right guesses, in the end by the servers' weights; sent_share, "
    "received_share: bytes of worker 0 by those of its gradients and weights in all steps",
}


class Case(NamedTuple):
    """A network, a rule of `experiments.training.encodings`, and what begins random numbers."""

    task: str
    rule: str
    seed: int
    epochs: int


def cases(quick: bool) -> Iterator[Case]:
    """All trainings; seeds are outermost, and rules take turns."""
    for seed in range(1 if quick else SEEDS):
        for task in [*TASKS][: 1 if quick else None]:
            for rule in LOCAL:
                yield Case(task, rule, seed, 2 if quick else TASKS[task].epochs)


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    with Cluster(1) as cluster:
        rule, recipe = LOCAL[case.rule], TASKS[case.task].recipe
        flags = [] if case.rule == "exact" else ["--own-batch"]
        return train(cluster, case.task, rule, case.seed, case.epochs, recipe, flags)


def main(argv: Optional[Sequence[str]] = None) -> None:
    chosen = turns.arguments(__doc__.splitlines()[0]).parse_args(argv)
    records = Records(options.numbers_path(chosen, "diloco"), _ABOUT)
    turns.measure_each(records, chosen, [*cases(chosen.quick)], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
