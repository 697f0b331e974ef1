"""Figures 5.7 and 5.8 of the thesis: accuracy by iteration and by time, exact and with all
optimizations together, in trainings on four throttled hosts. Nothing is emulated.

python -m experiments.thesis.accuracy
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import WORKERS, train
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_accuracy import COMPARED, draw, summarize, table_text
from experiments.emulation.systems import SYSTEMS
from experiments.training.encodings import ENCODINGS
from experiments.training.tasks import TASKS, Recipe

TASK = "digits"
RATE_MBIT_S = 80.0
RECIPE = Recipe(0.1, 0.0, 1e-4)
"""The thesis's: plain SGD with a rate of 0.1."""
_QUICK_EPOCHS = 2
_ABOUT = {
    "figure": "thesis, figures 5.7 and 5.8: accuracy by iteration and by time",
    "computation": f"real: {WORKERS} workers, each on a host of its own with a server",
    "units": "validated: after each epoch, of samples that nobody trains with, by worker 0's "
    "weights; epoch_s: worker 0's, without validating; sent_share, received_share: bytes of "
    f"worker 0 by those of its gradients and weights; links carry {RATE_MBIT_S:g} Mbit/s in each "
    "direction, Ethernet frames",
}


class Case(NamedTuple):
    """A system of `by_accuracy.COMPARED`, the links' rate (None: no limit), and what begins its
    random numbers."""

    system: str
    rate_mbit_s: Optional[float]
    seed: int
    epochs: int


def cases(seeds: int, quick: bool) -> Sequence[Case]:
    """All trainings; seeds are outermost, and systems take turns."""
    return [
        Case(system, RATE_MBIT_S, seed, _QUICK_EPOCHS if quick else of.epochs)
        for seed in range(seeds)
        for system, of in COMPARED.items()
    ]


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    of = COMPARED[case.system]
    with Cluster(WORKERS, case.rate_mbit_s) as cluster:
        flags = ["--constant-rate", *(["--in-turn"] if SYSTEMS[case.system].in_turn else [])]
        return train(
            cluster, TASK, ENCODINGS["exact"], case.seed, case.epochs, RECIPE, flags,
            **SYSTEMS[case.system].environment,
        )  # fmt: skip


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default: %(default)s")
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "thesis_accuracy"), _ABOUT)
    turns.measure_each(records, chosen, cases(chosen.seeds, chosen.quick), run)
    steps = TASKS[TASK].steps(WORKERS)
    records.summary = summarize(records.runs, steps)
    print(table_text(records.summary))
    curves.finish(records, draw(records.runs, steps, records.summary))


if __name__ == "__main__":
    main()
