"""Figure 11 of P3: validation accuracy with exact gradients and with DGC's, over epochs and time.

python -m experiments.figure11
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import WORKERS, train
from experiments.cluster import Cluster
from experiments.drawing import curves
from experiments.drawing.over_epochs import COMPARED, draw, summarize, table_text
from experiments.training.encodings import ENCODINGS
from experiments.training.tasks import TASKS, Recipe

TASK = "digits"
RATES_MBIT_S = (100.0, 25.0)
SETTINGS = (
    Recipe(0.1, 0.9, 1e-4),
    Recipe(0.05, 0.9, 1e-4),
    Recipe(0.2, 0.9, 1e-4),
    Recipe(0.1, 0.9, 1e-3),
    Recipe(0.1, 0.8, 1e-4),
)
"""Five, as in the paper, which does not say which."""
_EPOCHS, _TIMED_EPOCHS, _QUICK_EPOCHS = 15, 3, 2
_QUICK_SETTINGS = 2
_ABOUT = {
    "figure": "P3 figure 11: validation accuracy with exact gradients and with DGC's, over epochs "
    "and over time",
    "paper": "section 5.5: ResNet-110, CIFAR-10, 4 machines, 160 epochs, 5 settings of the "
    "hyper-parameters; DGC loses 0.004 of the accuracy in the mean",
    "computation": f"real, {WORKERS} workers. Without a rate all are on one host, over its "
    "loopback, with a server; with one, each has a host with a server",
    "units": "setting: place in experiments.figure11.SETTINGS, and the seed; validated: after each "
    "epoch, of samples that nobody trains with, by worker 0's weights; epoch_s: without "
    "validating; rate_mbit_s: each link, each direction, Ethernet frames",
}


class Case(NamedTuple):
    """How gradients travel, a setting of hyper-parameters, and the links' rate; None: one host."""

    encoding: str
    setting: int
    rate_mbit_s: Optional[float]
    epochs: int


def cases(settings: int, epochs: int) -> Iterator[Case]:
    """All trainings to the end, and then what is timed; encodings take turns."""
    for setting in range(settings):
        for encoding in COMPARED:
            yield Case(encoding, setting, None, epochs)
    for rate_mbit_s in RATES_MBIT_S:
        for encoding in COMPARED:
            yield Case(encoding, 0, rate_mbit_s, _TIMED_EPOCHS)


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    hosts = 1 if case.rate_mbit_s is None else WORKERS
    encoding, recipe = ENCODINGS[case.encoding], SETTINGS[case.setting]
    with Cluster(hosts, case.rate_mbit_s) as cluster:
        found = train(cluster, TASK, encoding, case.setting, case.epochs, recipe)
    return {"task": TASK, **recipe._asdict(), **found}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "figure11"), _ABOUT)
    quick = (_QUICK_SETTINGS, _QUICK_EPOCHS)
    planned = cases(*(quick if chosen.quick else (len(SETTINGS), _EPOCHS)))
    turns.measure_each(records, chosen, [*planned], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary, TASKS[TASK].title, WORKERS))


if __name__ == "__main__":
    main()
