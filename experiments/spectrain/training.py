"""SpecTrain's figure 12 and table 1: what networks learn with exact, stale and predicted weights.

python -m experiments.spectrain.training
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence

from experiments.campaign import options, turns
from experiments.campaign.records import Records
from experiments.campaign.training import train_stale
from experiments.drawing import curves
from experiments.drawing.by_prediction import LOSSES_MEAN_OF, draw, summarize, table_text
from experiments.spectrain.recipes import RECIPES
from experiments.training.rules import RULES
from experiments.training.tasks import TASKS

STALENESS = 3
_STEPS = {"digits": 400, "text": 800}
_VALIDATIONS = 8
_SEEDS, _QUICK_SEEDS, _QUICK_STEPS = 5, 2, 40
_ABOUT = {
    "figure": "SpecTrain, figure 12 and table 1: losses and accuracy with exact, stale and "
    f"predicted weights, s = {STALENESS}",
    "paper": "section 4.4: six networks in a pipeline of 4 GPUs, whose s is 0 to 6 by the stage, "
    "5000 steps; accuracy drops by 2.1 % with stale weights, and almost never with predicted ones",
    "computation": "real: a worker and a server on one host, over its loopback",
    "units": f"losses: of the worker's batches, means of {LOSSES_MEAN_OF} steps, in nats; "
    "validated: at equal distances, of samples that nobody trains with, by the servers' weights; "
    "error, stale_error: as in figure 9, means of all steps",
}


class Case(NamedTuple):
    """A network, with which weights the worker computes, and what begins its random numbers."""

    task: str
    rule: str
    seed: int
    steps: int
    learning_rate: float


def cases(seeds: int, quick: bool) -> Iterator[Case]:
    """All trainings; seeds are outermost, and rules take turns."""
    for seed in range(_QUICK_SEEDS if quick else seeds):
        for task in list(TASKS)[: 1 if quick else None]:
            steps = _QUICK_STEPS if quick else _STEPS[task]
            for recipe in RECIPES[task]:
                for rule in RULES:
                    yield Case(task, rule, seed, steps, recipe.learning_rate)


def run(case: Case) -> Dict[str, Any]:
    """Trains once. Raises RunFailed."""
    rule = RULES[case.rule]
    (recipe,) = (one for one in RECIPES[case.task] if one.learning_rate == case.learning_rate)
    found = train_stale(case.task, rule, STALENESS, case.seed, case.steps, _VALIDATIONS, recipe)
    losses = found["losses"]
    return {
        **recipe._asdict(),
        "losses": [
            round(statistics.mean(losses[first:][:LOSSES_MEAN_OF]), 5)
            for first in range(0, len(losses), LOSSES_MEAN_OF)
        ],
        "validated": [
            {name: round(value, 5) for name, value in one.items()} for one in found["validated"]
        ],
        "error": float(f"{statistics.mean(found['errors']):.4g}"),
        "stale_error": float(f"{statistics.mean(found['stale_errors']):.4g}"),
    }


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = turns.arguments(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=_SEEDS, metavar="N")
    chosen = parser.parse_args(argv)
    records = Records(options.numbers_path(chosen, "spectrain_training"), _ABOUT)
    turns.measure_each(records, chosen, [*cases(chosen.seeds, chosen.quick)], run)
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records.runs))


if __name__ == "__main__":
    main()
