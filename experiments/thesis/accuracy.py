"""Figures 5.7 and 5.8 of the thesis: accuracy by iteration and by time, exact and with all
optimizations together, in trainings on four throttled hosts. Nothing is emulated.

python -m experiments.thesis.accuracy
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import WORKERS, train
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.by_accuracy import draw, summarize, table_text
from experiments.training.encodings import THESIS
from experiments.training.tasks import TASKS, Recipe

TASK = "digits"
RATES_MBIT_S = (130.0, 50.0)
"""M is about 1.5 and 4 times as long as a step's computation, with all processes on two cores."""
RECIPE = Recipe(0.1, 0.0, 1e-4)
"""Plain SGD with a constant rate of 0.1, as in the thesis."""
_EPOCHS = {"in_turn": 8, "p3kv": 8, "all": 13}
_QUICK_EPOCHS = 1
_ABOUT = {
    "figure": "thesis, figures 5.7 and 5.8: accuracy by iteration and by time",
    "computation": f"real: {WORKERS} workers, each on a host of its own with a server",
    "units": "validated: after each epoch, of samples that nobody trains with, by worker 0's "
    "weights, in the end by the servers'; epoch_s: worker 0's, without validating; sent_share, "
    "received_share: bytes of worker 0 by those of its gradients and weights in all steps; "
    "rate_mbit_s: each link, each direction, Ethernet frames",
}


class Case(NamedTuple):
    """A way to train of `experiments.training.encodings.THESIS`, the links' rate, and what begins
    random numbers."""

    way: str
    rate_mbit_s: float
    seed: int
    epochs: int


def cases(seeds: int, rates_mbit_s: Sequence[float], quick: bool) -> List[Case]:
    """All trainings; seeds are outermost, and ways take turns."""
    return [
        Case(way, rate_mbit_s, seed, _QUICK_EPOCHS if quick else _EPOCHS[way])
        for seed in range(seeds)
        for rate_mbit_s in rates_mbit_s[: 1 if quick else None]
        for way in THESIS
    ]


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    flags = ["--constant-rate", *["--in-turn"] * (case.way == "in_turn")]
    with Cluster(WORKERS, case.rate_mbit_s) as cluster:
        return train(cluster, TASK, THESIS[case.way], case.seed, case.epochs, RECIPE, flags)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--rates", nargs="+", type=float, choices=RATES_MBIT_S, metavar="MBIT_S")
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "thesis_accuracy"), _ABOUT)
    planned = cases(chosen.seeds, chosen.rates or RATES_MBIT_S, chosen.quick)
    turns.measure_each(records, chosen, planned, run)
    steps = TASKS[TASK].steps(WORKERS)
    records.summary = summarize(records.runs, steps)
    print(table_text(records.summary))
    curves.finish(records, draw(records.runs, steps))


if __name__ == "__main__":
    main()
