"""What trained networks are worth at the end, by how gradients and values travel.

Two networks on real data, trained to the end with each codec and with exact gradients, from the
same first weights and with the same batches for each seed.

python -m experiments.convergence
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import WORKERS, train
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_encoding import draw, summarize, table_text
from experiments.training.encodings import ENCODINGS
from experiments.training.tasks import TASKS

_QUICK_EPOCHS = 1
_QUICK_SEEDS = 2
_ABOUT = {
    "figure": "loss and accuracy of two trained networks, by how gradients and values travel",
    "computation": f"real: {WORKERS} workers and a server on one host, over its loopback",
    "units": "validated: after each epoch, of samples that nobody trains with, the loss in nats "
    "and the share of right guesses, by worker 0's weights; epoch_s: without validating; "
    "sent_share, received_share: bytes of worker 0 by those of its gradients and weights",
}


class Case(NamedTuple):
    """A network, how its gradients and values travel, and what begins its random numbers."""

    task: str
    encoding: str
    seed: int
    epochs: int


def cases(
    tasks: Sequence[str], encodings: Sequence[str], seeds: int, quick: bool
) -> Iterator[Case]:
    """All trainings; seeds are outermost, and encodings take turns."""
    for seed in range(_QUICK_SEEDS if quick else seeds):
        for task in tasks[: 1 if quick else None]:
            for encoding in encodings:
                yield Case(task, encoding, seed, _QUICK_EPOCHS if quick else TASKS[task].epochs)


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    encoding, recipe = ENCODINGS[case.encoding], TASKS[case.task].recipe
    with Cluster(1) as cluster:
        return train(cluster, case.task, encoding, case.seed, case.epochs, recipe)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--encodings", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="default: %(default)s")
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "convergence"), _ABOUT)
    planned = cases(chosen.tasks, chosen.encodings, chosen.seeds, chosen.quick)
    turns.measure_each(records, chosen, [*planned], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary))


if __name__ == "__main__":
    main()
