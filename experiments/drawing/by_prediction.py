"""What networks learn with exact, stale and predicted weights: curves, and the best of each."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.drawing import output
from experiments.drawing.by_encoding import Comparison, compared
from experiments.drawing.by_weight_error import COLOURS as _OF_STALE
from experiments.training.rules import EXACT, RULES, STALE
from experiments.training.tasks import TASKS

LOSSES_MEAN_OF = 20
"""Steps, as far apart as the paper records losses."""
_COLOURS = {EXACT: output.COLOURS["bound"], **_OF_STALE}


class Training(NamedTuple):
    """A panel: a network, and the learning rate that all rules have."""

    task: str
    learning_rate: float


class Measure(NamedTuple):
    """A column of the paper's table 1: the least or the greatest value of a training."""

    title: str
    best: Any
    validated: Optional[str] = None
    """The name of what validation found; None: the worker's own losses."""

    def curve(self, run: Mapping[str, Any]) -> List[float]:
        if self.validated is None:
            return list(run["losses"])
        return [one[self.validated] for one in run["validated"]]


MEASURES = {
    "training_loss": Measure("training loss", min),
    "validation_loss": Measure("validation loss", min, "loss"),
    "accuracy": Measure("validation accuracy", max, "accuracy"),
}


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each training and rule: mean and deviation of each measure's best values, and how
    they differ from those of exact and of stale weights, seed by seed.

    There is no difference where fewer than two seeds have both, or all differ by the same.
    """
    rows = []
    for training in _trainings(runs):
        for rule in RULES:
            of = _select(runs, training, rule)
            if not of:
                continue
            row: Dict[str, Any] = {**training._asdict(), "rule": rule, "steps": of[0]["steps"]}
            if rule != EXACT:
                ratios = [run["error"] / run["stale_error"] for run in of]
                row["error_by_stale"] = round(statistics.mean(ratios), 4)
            for name, measure in MEASURES.items():
                best = _best(of, measure)
                values = list(best.values())
                row[name] = {
                    "mean": round(statistics.mean(values), 5),
                    "deviation": round(statistics.stdev(values), 5) if len(values) > 1 else None,
                    "by_seed": {str(seed): value for seed, value in best.items()},
                }
                for other in (EXACT, STALE):
                    theirs = _best(_select(runs, training, other), measure)
                    pairs = [(best[seed], theirs[seed]) for seed in best if seed in theirs]
                    if len({round(one - another, 9) for one, another in pairs}) > 1:
                        found = compared(*zip(*pairs))._asdict()
                        row[name][f"less_{other}"] = {
                            part: float(f"{value:.3g}") for part, value in found.items()
                        }
            rows.append(row)
    return rows


def _trainings(runs: Sequence[Mapping[str, Any]]) -> List[Training]:
    return [*dict.fromkeys(Training(run["task"], run["learning_rate"]) for run in runs)]


def _select(
    runs: Sequence[Mapping[str, Any]], training: Training, rule: str
) -> List[Mapping[str, Any]]:
    asked = {**training._asdict(), "rule": rule}
    return [run for run in runs if asked.items() <= {name: run[name] for name in asked}.items()]


def _best(runs: Sequence[Mapping[str, Any]], measure: Measure) -> Dict[int, float]:
    """By seed."""
    return dict(sorted((run["seed"], measure.best(measure.curve(run))) for run in runs))


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        error = f", error {row['error_by_stale']:.3f} of stale" if row["rule"] != EXACT else ""
        lines.append(
            f"{row['task']}, rate {row['learning_rate']:g}, {RULES[row['rule']].title}, "
            f"{row['steps']} steps, {len(row['accuracy']['by_seed'])} seeds{error}"
        )
        for name, measure in MEASURES.items():
            found = row[name]
            spread = f" (sd {found['deviation']:.4f})" if found["deviation"] is not None else ""
            line = f"  {measure.title:20} {found['mean']:.4f}{spread}"
            for other in (EXACT, STALE):
                if f"less_{other}" in found:
                    of = Comparison(**found[f"less_{other}"])
                    line += f"; less {other}'s {of.mean:+.4f} ({of.low:+.4f} to {of.high:+.4f}), "
                    line += f"p = {of.p:.3f}"
            lines.append(line)
    return "\n".join(lines)


def draw(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Curves of each measure for each task: thin ones are seeds, thick ones their mean."""
    output.style()
    trainings = _trainings(runs)
    figure, axes = plt.subplots(
        len(trainings),
        len(MEASURES),
        figsize=(3.9 * len(MEASURES), 3.0 * len(trainings)),
        squeeze=False,
    )
    for row, training in zip(axes, trainings):
        for axis, measure in zip(row, MEASURES.values()):
            late = []
            for rule in RULES:
                of = _select(runs, training, rule)
                if not of:
                    continue
                found = np.array([measure.curve(run) for run in of])
                steps = of[0]["steps"] / found.shape[1] * np.arange(1, found.shape[1] + 1)
                colour, mean = _COLOURS[rule], found.mean(axis=0)
                axis.plot(steps, found.T, color=colour, linewidth=0.5, alpha=0.35)
                axis.plot(steps, mean, color=colour, linewidth=1.6, label=RULES[rule].title)
                late.append(mean[len(mean) // 4 :])
            if measure.best is min:
                axis.set_yscale("log")
            else:
                # The first steps are far below, and hide what the last ones differ by.
                axis.set_ylim(bottom=np.min(np.concatenate(late)) - 0.05)
            title = f"{TASKS[training.task].title}, rate {training.learning_rate:g}"
            axis.set_title(f"{title}:\n{measure.title}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    axes[0][0].legend(fontsize=7)
    return figure
