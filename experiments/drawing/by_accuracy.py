"""Accuracy by iteration and by time of trainings, and when they reach the same accuracy.

Runs are records as `experiments.thesis.accuracy` keeps them.
"""

from __future__ import annotations

import statistics
from itertools import accumulate
from typing import Any, Dict, List, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.drawing import output
from experiments.drawing.curves import Spread
from experiments.training.encodings import THESIS

TARGET = 0.95
THESIS_SHARE = 0.43
"""Of the original TensorFlow's time, in which all optimizations together reach the same accuracy
(section 5)."""
COLOURS = {"in_turn": output.COLOURS["baseline"], "p3kv": output.COLOURS["p3"], "all": "#009E73"}


def reached(places: Sequence[float], accuracies: Sequence[float]) -> Optional[float]:
    """Where TARGET is reached first, on straight lines from nothing at 0 through all `places`; None
    if it is not."""
    before = (0.0, 0.0)
    for place, accuracy in zip(places, accuracies):
        if accuracy >= TARGET:
            part = (TARGET - before[1]) / (accuracy - before[1])
            return before[0] + part * (place - before[0])
        before = (place, accuracy)
    return None


def summarize(runs: Sequence[Mapping[str, Any]], steps: int) -> List[Dict[str, Any]]:
    """A row for each rate and way to train: an iteration's time, when TARGET is reached, as a part
    of the exact ways' times, too, and the accuracy after the epochs that all have made.

    `steps` are those of an epoch, and an iteration's time is that of the median epoch. Of several
    seeds, numbers are means; the target's are those of seeds with which it is reached.
    """
    fewest = min((len(run["epoch_s"]) for run in runs), default=0)
    rows: List[Dict[str, Any]] = []
    for rate in sorted({run["rate_mbit_s"] for run in runs}, reverse=True):
        by_way: Dict[str, Dict[str, Any]] = {}
        for way in THESIS:
            of = [run for run in runs if (run["rate_mbit_s"], run["way"]) == (rate, way)]
            if of:
                by_way[way] = _row(of, steps, fewest)
        rows += [
            {
                "rate_mbit_s": rate,
                "way": way,
                **row,
                "time_shares": {
                    exact: round(row["target_s"] / by_way[exact]["target_s"], 3)
                    for exact in ("in_turn", "p3kv")
                    if row["target_s"] and by_way.get(exact, {}).get("target_s")
                },
            }
            for way, row in by_way.items()
        ]
    return rows


def _row(runs: Sequence[Mapping[str, Any]], steps: int, epochs: int) -> Dict[str, Any]:
    found_s, found_steps = [], []
    for run in runs:
        accuracies = _accuracies(run)
        found_s.append(reached(list(accumulate(run["epoch_s"])), accuracies))
        found_steps.append(reached([steps * (at + 1) for at in range(len(accuracies))], accuracies))
    return {
        "iteration_s": round(_mean([statistics.median(run["epoch_s"]) for run in runs]) / steps, 4),
        "target_iterations": _mean_known(found_steps),
        "target_s": _mean_known(found_s),
        "epochs": epochs,
        "accuracy": round(_mean([_accuracies(run)[epochs - 1] for run in runs]), 4),
        "best_accuracy": Spread.of([max(_accuracies(run)) for run in runs])._asdict(),
        "seeds": len(runs),
    }


def _accuracies(run: Mapping[str, Any]) -> List[float]:
    return [one["accuracy"] for one in run["validated"]]


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values)


def _mean_known(values: Sequence[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None]
    return round(_mean(known), 2) if known else None


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        when = "not"
        if row["target_s"]:
            shares = (f"{share:.2f} of {way}'s" for way, share in row["time_shares"].items())
            when = f"after {row['target_iterations']:.0f} iterations, {row['target_s']:.1f} s"
            when += f" ({', '.join(shares)})"
        lines.append(
            f"{row['rate_mbit_s']:g} Mbit/s {THESIS[row['way']].title:36} iteration "
            f"{row['iteration_s']:.4f} s, {TARGET} {when}; {row['accuracy']:.4f} after "
            f"{row['epochs']} epochs, at best {row['best_accuracy']['median']:.4f}, "
            f"{row['seeds']} seeds"
        )
    return "\n".join(lines) + f"\nthe thesis: {THESIS_SHARE} of the time"


def draw(runs: Sequence[Mapping[str, Any]], steps: int) -> Figure:
    """Figures 5.7 and 5.8: accuracy by iteration, and by time for each rate; a line a training."""
    output.style()
    rates = sorted({run["rate_mbit_s"] for run in runs}, reverse=True)
    figure, axes = plt.subplots(1, 1 + len(rates), figsize=(4.2 * (1 + len(rates)), 3.8))
    for axis, rate in zip(axes, [None, *rates]):
        drawn = set()
        for run in runs:
            way, epoch_s = run["way"], run["epoch_s"]
            if rate not in (None, run["rate_mbit_s"]):
                continue
            axis.plot(
                [*accumulate(epoch_s if rate else [steps] * len(epoch_s))], _accuracies(run),
                color=COLOURS[way], linestyle="--" if way == "in_turn" else "-", marker=".",
                linewidth=1, label=None if way in drawn else THESIS[way].title,
            )  # fmt: skip
            drawn.add(way)
        axis.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylim(0.5, 1.0)
        axis.set_xlabel("seconds" if rate else "iteration")
        axis.set_title(f"5.8: links of {rate:g} Mbit/s" if rate else "5.7: accuracy by iteration")
    axes[0].set_ylabel("validation accuracy, worker 0's weights")
    axes[0].legend(fontsize=7, loc="lower right")
    return figure
