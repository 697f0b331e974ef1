"""Loss by time of several systems that train one network, beside one process on all batches."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.drawing import output
from experiments.drawing.curves import LOOKS, Spread
from experiments.emulation.systems import SYSTEMS

ALONE = "alone"
"""One process that reads all workers' batches."""
_SMOOTHED = 10
"""Losses are means of so many steps."""
_WARM_UP = 5


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each system: seconds of a step and until the loss that one process has at its end,
    and the greatest difference of a step's loss from that process's."""
    alone = next(run for run in runs if run["system"] == ALONE)
    target = smoothed(alone["losses"])[-1]
    rows = []
    for system in dict.fromkeys(run["system"] for run in runs):
        of = [run for run in runs if run["system"] == system]
        differences = np.array([run["losses"] for run in of]) - np.array(alone["losses"])
        rows.append(
            {
                "system": system,
                "repetitions": len(of),
                "step_s": _rounded([statistics.median(_steps_s(run)) for run in of]),
                "target_loss": round(target, 4),
                "to_target_s": _rounded([_reached_s(run, target) for run in of]),
                "most_different": float(f"{np.abs(differences).max():.1e}"),
            }
        )
    return rows


def smoothed(losses: Sequence[float]) -> List[float]:
    """Means of each loss and those before it, as many as there are up to `_SMOOTHED`."""
    return [
        statistics.mean(losses[max(0, end - _SMOOTHED) : end]) for end in range(1, len(losses) + 1)
    ]


def _steps_s(run: Mapping[str, Any]) -> List[float]:
    ends_s = run["ends_s"]
    return [after - before for before, after in zip(ends_s, ends_s[1:])][_WARM_UP:]


def _reached_s(run: Mapping[str, Any], target: float) -> float:
    """When the loss was as low first; rounding may leave it a little above at the end."""
    reached = [at for at, loss in zip(run["ends_s"], smoothed(run["losses"])) if loss <= target]
    return float(reached[0] if reached else run["ends_s"][-1])


def _rounded(seconds: Sequence[float]) -> Dict[str, float]:
    return Spread.of(seconds).rounded()


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    return "\n".join(
        f"{_look(row['system'])[0]:34} step {row['step_s']['median']:.3f} s "
        f"({row['step_s']['low']:.3f} to {row['step_s']['high']:.3f}), loss "
        f"{row['target_loss']} after {row['to_target_s']['median']:.1f} s, at most "
        f"{row['most_different']:g} from one process's, {row['repetitions']} times"
        for row in table
    )


def draw(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss by step, where all curves should be one, and by time."""
    output.style()
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10.4, 3.8), sharey=True)
    for system in dict.fromkeys(run["system"] for run in runs):
        run = next(run for run in runs if run["system"] == system)
        title, colour = _look(system)
        losses = smoothed(run["losses"])
        alone = system == ALONE
        width = 4.0 if alone else 1.2
        by_step.plot(losses, color=colour, linewidth=width, label=title, zorder=1 if alone else 2)
        if not alone:
            by_time.plot(run["ends_s"], losses, color=colour, label=title)
    by_step.set_xlabel("step")
    by_time.set_xlabel("seconds")
    by_step.set_ylabel(f"loss, mean of {_SMOOTHED} steps")
    by_step.legend(fontsize=7)
    by_time.legend(fontsize=7)
    return figure


def _look(system: str) -> Tuple[str, str]:
    """Its title and its colour."""
    if system == ALONE:
        return "one process, all batches", "#DDDDDD"
    return SYSTEMS[system].title, LOOKS[system].colour
