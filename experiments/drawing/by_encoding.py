"""What trainings end with, by how gradients and values travel: against exact ones, seed by seed."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from experiments.drawing import output
from experiments.training.encodings import ENCODINGS
from experiments.training.tasks import TASKS

CONFIDENCE = 0.95
_EXACT = "exact"


class Comparison(NamedTuple):
    """Paired differences of two trainings: those of equal seeds."""

    mean: float
    low: float
    high: float
    """Ends of the interval of CONFIDENCE for the mean, by Student's t."""
    p: float
    """Two-sided, of the paired t-test, for this comparison alone."""


def compared(ours: Sequence[float], exact: Sequence[float]) -> Comparison:
    """Compares two or more pairs that do not all differ by the same."""
    apart = [one - other for one, other in zip(ours, exact)]
    mean = statistics.mean(apart)
    low, high = stats.t.interval(CONFIDENCE, len(apart) - 1, mean, stats.sem(apart))
    return Comparison(mean, low, high, float(stats.ttest_rel(ours, exact).pvalue))


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each task and encoding: its score by seed, bytes, and the comparison with exact.

    The score is the last epoch's. A row has no comparison where fewer than two seeds have both, or
    all differ by the same.
    """
    rows = []
    for task in TASKS:
        exact = _scores(runs, task, _EXACT)
        for encoding in ENCODINGS:
            scores = _scores(runs, task, encoding)
            if not scores:
                continue
            values = list(scores.values())
            of = [run for run in runs if (run["task"], run["encoding"]) == (task, encoding)]
            row = {
                "task": task,
                "encoding": encoding,
                "epochs": of[0]["epochs"],
                "scores": {str(seed): score for seed, score in scores.items()},
                "mean": statistics.mean(values),
                "deviation": statistics.stdev(values) if len(values) > 1 else None,
                **{
                    name: statistics.median(run[name] for run in of)
                    for name in ("sent_share", "received_share")
                },
            }
            both = sorted(set(scores) & set(exact))
            pairs = [scores[seed] for seed in both], [exact[seed] for seed in both]
            apart = {round(one - other, 9) for one, other in zip(*pairs)}
            if encoding != _EXACT and len(apart) > 1:
                row["against_exact"] = compared(*pairs)._asdict()
            rows.append(row)
    return rows


def _scores(runs: Sequence[Mapping[str, Any]], task: str, encoding: str) -> Dict[int, float]:
    """By seed."""
    score = TASKS[task].score
    found = {
        run["seed"]: run["validated"][-1][score]
        for run in runs
        if (run["task"], run["encoding"]) == (task, encoding)
    }
    return dict(sorted(found.items()))


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        deviation = "" if row["deviation"] is None else f" (sd {row['deviation']:.4f})"
        line = (
            f"{row['task']:<7} {row['encoding']:<10} {TASKS[row['task']].score} "
            f"{row['mean']:.4f}{deviation}, {len(row['scores'])} seeds; sends "
            f"{row['sent_share']:.4f}, receives {row['received_share']:.4f} of exact bytes"
        )
        if "against_exact" in row:
            of = Comparison(**row["against_exact"])
            line += f"; {of.mean:+.4f} ({of.low:+.4f} to {of.high:+.4f}), p = {of.p:.3f}"
        lines.append(line)
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws for each task how much its score differs from exact: seeds, mean and interval."""
    output.style()
    tasks = list(dict.fromkeys(row["task"] for row in table))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 3.8), squeeze=False)
    for axis, task in zip(axes.flat, tasks):
        _draw_task(axis, task, [row for row in table if row["task"] == task])
    axes.flat[0].legend(fontsize=7, framealpha=0.9)
    return figure


def _draw_task(axis: Axes, task: str, rows: Sequence[Mapping[str, Any]]) -> None:
    (exact,) = (row for row in rows if row["encoding"] == _EXACT)
    others = [row for row in rows if row is not exact]
    axis.axhline(0, color=output.COLOURS["bound"], linewidth=1)
    for place, row in enumerate(others):
        apart = [
            score - exact["scores"][seed]
            for seed, score in row["scores"].items()
            if seed in exact["scores"]
        ]
        axis.plot(
            [place] * len(apart), apart, "o", markersize=4, color=output.COLOURS["baseline"],
            label="a seed" if place == 0 else None,
        )  # fmt: skip
        if "against_exact" in row:
            of = Comparison(**row["against_exact"])
            axis.errorbar(
                place + 0.2, of.mean, yerr=[[of.mean - of.low], [of.high - of.mean]], fmt="D",
                markersize=4, capsize=3, color=output.COLOURS["plain"],
                label=f"mean, {CONFIDENCE:.0%} interval" if place == 0 else None,
            )  # fmt: skip
    axis.set_xticks(
        range(len(others)), [ENCODINGS[row["encoding"]].title for row in others],
        rotation=20, ha="right",
    )  # fmt: skip
    of = TASKS[task]
    axis.set_ylabel(f"{of.score}, less that of exact")
    spread = f" (sd {exact['deviation']:.4f})" if exact["deviation"] is not None else ""
    axis.set_title(
        f"{of.title}, {exact['epochs']} epochs\nexact: {of.score} {exact['mean']:.4f}{spread}",
        fontsize=9,
    )
