"""SpecTrain's figure 9: how far stale and predicted weights are from the true ones, step by step.

python -m experiments.spectrain.error
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import train_stale
from experiments.drawing import curves
from experiments.drawing.by_weight_error import draw, summarize, table_text
from experiments.spectrain.recipes import OPTIMIZERS
from experiments.training.rules import DAMPED, PREDICTED, RULES
from experiments.training.tasks import TASKS

TASK = "digits"
STALENESSES = (1, 2, 3)
_STEPS, _QUICK_STEPS = 400, 40
_SEED = 0
_ABOUT = {
    "figure": "SpecTrain, figure 9: root-mean-square error of stale and of predicted weights",
    "paper": "section 3.3: SNN on 4 GPUs, SGD with momentum; the predicted weights' error is "
    "always much lower, at s = 3 it is 1.5 % of that of stale ones in the mean",
    "computation": "real: a worker and a server on one host, over its loopback",
    "units": "errors: of each step, of the weights that the worker computes with, against the "
    "servers' after its last push; stale_errors: in the same training, of the servers' weights "
    "`staleness` steps before",
}


class Case(NamedTuple):
    """An optimizer, how many rounds ago the worker's weights were, and how they are predicted."""

    optimizer: str
    staleness: int
    rule: str
    steps: int


def cases(quick: bool) -> Iterator[Case]:
    """All trainings; the two predictions take turns."""
    for optimizer in OPTIMIZERS:
        for staleness in STALENESSES[-1:] if quick else STALENESSES:
            for rule in (PREDICTED, DAMPED):
                yield Case(optimizer, staleness, rule, _QUICK_STEPS if quick else _STEPS)


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    rule, recipe = RULES[case.rule], OPTIMIZERS[case.optimizer]
    found = train_stale(TASK, rule, case.staleness, _SEED, case.steps, 1, recipe)
    return {
        "task": TASK,
        **recipe._asdict(),
        **{name: [float(f"{one:.4g}") for one in found[name]] for name in found if "err" in name},
    }


def main(argv: Optional[Sequence[str]] = None) -> None:
    chosen = turns.arguments(__doc__.splitlines()[0]).parse_args(argv)
    records = Records(options.numbers_path(chosen, "spectrain_error"), _ABOUT)
    turns.measure_each(records, chosen, [*cases(chosen.quick)], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.runs, TASKS[TASK].title))


if __name__ == "__main__":
    main()
