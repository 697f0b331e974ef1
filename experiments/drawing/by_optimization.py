"""Speed-ups of single optimizations, beside what the thesis reports.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.drawing import bars, curves, output
from experiments.drawing.by_placement import HOSTS, RATIOS
from experiments.drawing.curves import Spread

MODELS = ("resnet110", "inception_v4")
BASELINE = "p3kv_in_turn"
COMPARED = {
    BASELINE: ("exact, computing and sending in turn", output.COLOURS["baseline"]),
    "dist_sync_apart": ("exact, MXNet's push and pull apart", "#CC79A7"),
    "slicing": ("exact, wait-free", output.COLOURS["slicing"]),
    "p3kv": ("exact, wait-free, by priority", output.COLOURS["p3"]),
    "p3kv_topk": ("top-1 % both ways", "#009E73"),
}
"""By system: what is drawn, from left to right."""
THESIS_GAINS = {"resnet110": {"slicing": 1.54}, "inception_v4": {"slicing": 1.29}}
"""Figure 5.4: over traditional backpropagation, which computes and sends in turn. Its text has no
numbers of the other bars of one optimization."""


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each model and system: the speed-up, and the gain over `BASELINE`."""
    rows = []
    for model in MODELS:
        baseline: Optional[float] = None
        for system in COMPARED:
            of = curves.select(runs, model=model, system=system)
            limited = [run for run in of if run["rate_mbit_s"] is not None]
            if not limited:
                continue
            taken = curves.speed_up(limited)
            if system == BASELINE:
                baseline = taken.median
            rows.append(
                {
                    "model": model,
                    "system": system,
                    "ratio": RATIOS[model],
                    "speed_up": taken._asdict(),
                    "gain": round(taken.median / baseline, 3) if baseline else None,
                    "thesis_gain": THESIS_GAINS[model].get(system),
                    "unlimited_efficiency": curves.unlimited(of).get(system),
                }
            )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        taken, free = row["speed_up"], row["unlimited_efficiency"]
        lines.append(
            f"{row['model']:12} {COMPARED[row['system']][0]:36} speed-up {taken['median']:.2f} "
            f"({taken['low']:.2f} to {taken['high']:.2f})"
            + (f", gain {row['gain']:.2f}" if row["gain"] else "")
            + (f", thesis {row['thesis_gain']:.2f}" if row["thesis_gain"] else "")
            + (f", efficiency without a limit {free:.3f}" if free is not None else "")
        )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """Bars of speed-ups, and a mark where one with the thesis's gain would be."""
    output.style()
    figure, axis = plt.subplots(figsize=(7.5, 4.2))
    looks = dict(COMPARED.values())
    values: Dict[str, Dict[str, Spread]] = {}
    label: Optional[str] = "the thesis's wait-free, by its gain over the first bar"
    for row in table:
        taken = Spread(**row["speed_up"])
        group = values.setdefault(f"{curves.TITLES[row['model']]}\nM/C = {row['ratio']:g}", {})
        group[COMPARED[row["system"]][0]] = taken
        if row["thesis_gain"] and row["gain"]:
            # Wait-free is the third of five bars, in the middle of its group.
            at, height = len(values) - 1, taken.median / row["gain"] * row["thesis_gain"]
            axis.plot(at + 0.085, height, "D", color="black", markersize=4, label=label)
            label = None
    bars.groups(axis, values, looks)
    axis.axhline(HOSTS, color="black", linewidth=0.8)
    axis.set_ylim(0, HOSTS * 1.45)
    axis.set_ylabel(f"speed-up on {HOSTS} hosts over one machine")
    axis.legend(fontsize=7, ncols=2, loc="upper right")
    curves.foot(figure, said)
    return figure
