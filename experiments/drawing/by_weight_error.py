"""How far stale and predicted weights are from the true ones, by optimizer and staleness."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import output
from experiments.training.rules import DAMPED, PREDICTED, RULES, STALE

COLOURS = {
    STALE: output.COLOURS["emphasis"],
    PREDICTED: output.COLOURS["p3"],
    DAMPED: "#009E73",
}
_LINES = {PREDICTED: "-", DAMPED: "--"}
_SMOOTHED = 20
"""Thick lines are means of so many steps, as in the paper's other curves."""


TITLES = {"sgd": "SGD, momentum 0.9", "adam": "Adam"}
"""Of optimizers."""


def counted(run: Mapping[str, Any], name: str) -> List[float]:
    """A run's errors without the first steps, whose weights are the initial ones whatever the
    rule: servers predict from their first update on."""
    return list(run[name][run["staleness"] + 1 :])


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each run: the mean errors of predicted and of stale weights in this training, what
    the one is of the other, and in which share of steps it is smaller."""
    rows = []
    for run in runs:
        predicted, stale = counted(run, "errors"), counted(run, "stale_errors")
        mean, of = statistics.mean(predicted), statistics.mean(stale)
        below = [one < other for one, other in zip(predicted, stale)]
        rows.append(
            {
                **{name: run[name] for name in ("optimizer", "staleness", "rule")},
                "error": float(f"{mean:.4g}"),
                "stale_error": float(f"{of:.4g}"),
                "ratio": round(mean / of, 4),
                "steps_below": round(statistics.mean(below), 4),
            }
        )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    return "\n".join(
        f"{row['optimizer']:4} s = {row['staleness']} {RULES[row['rule']].title:22} "
        f"{row['error']:.2e}, stale {row['stale_error']:.2e}: {row['ratio']:.3f} of it, smaller in "
        f"{row['steps_below']:.1%} of steps"
        for row in table
    )


def draw(runs: Sequence[Mapping[str, Any]], trained: str) -> Figure:
    """A panel for each optimizer and staleness, with both predictions."""
    output.style()
    panels = {
        optimizer: sorted({run["staleness"] for run in runs if run["optimizer"] == optimizer})
        for optimizer in dict.fromkeys(run["optimizer"] for run in runs)
    }
    columns = max(map(len, panels.values()))
    figure, axes = plt.subplots(
        len(panels), columns, figsize=(3.7 * columns, 2.9 * len(panels)), squeeze=False,
        sharey="row",
    )  # fmt: skip
    for row, (optimizer, stalenesses) in zip(axes, panels.items()):
        for axis, staleness in zip(row, stalenesses):
            asked = (optimizer, staleness)
            of = [run for run in runs if (run["optimizer"], run["staleness"]) == asked]
            _draw_panel(axis, of)
            axis.set_title(f"{TITLES[optimizer]}, s = {staleness}")
        row[0].set_ylabel("root-mean-square error")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    axes[0][0].legend(fontsize=6)
    figure.supxlabel(
        f"{trained}. Thin: each step; thick: means of {_SMOOTHED} steps. Dashed: the training with "
        "damped prediction; solid: that with equation 4.",
        fontsize=7,
        color="#555555",
    )
    return figure


def _draw_panel(axis: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    for run in runs:
        rule, first = run["rule"], run["staleness"] + 2
        for name, kind in (("stale_errors", STALE), ("errors", rule)):
            errors = counted(run, name)
            steps = np.arange(first, first + len(errors))
            label = RULES[kind].title if (kind, rule) != (STALE, DAMPED) else None
            axis.plot(steps, errors, _LINES[rule], color=COLOURS[kind], linewidth=0.4, alpha=0.35)
            smooth = np.convolve(errors, np.ones(_SMOOTHED) / _SMOOTHED, "valid")
            axis.plot(
                steps[_SMOOTHED - 1 :], smooth, _LINES[rule], color=COLOURS[kind], linewidth=1.4,
                label=label,
            )  # fmt: skip
    axis.set_yscale("log")
    ratios = [f"{RULES[row['rule']].title}: {row['ratio']:.2f} of stale" for row in summarize(runs)]
    axis.text(0.03, 0.04, "\n".join(ratios), transform=axis.transAxes, fontsize=7)
