"""Speed-ups of optimizations by model and by number of hosts, and what they use of accelerators and
links, beside what the thesis reports.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
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
    "p3kv_stale": ("staleness 5", "#56B4E9"),
    "p3kv_topk": ("top-1 % both ways", "#D55E00"),
    "p3kv_all": ("all: priority, staleness 5, top-1 %", "#009E73"),
}
"""By system: what is drawn, from left to right."""
PERIOD = 6
"""With staleness 5 a worker exchanges in every sixth iteration, which takes longer than others."""
SCALED_MODEL = "resnet110"
SCALED = (BASELINE, "p3kv", "p3kv_all")
"""Figure 5.5: systems that are measured on fewer hosts, too."""
THESIS_GAINS = {"resnet110": {"slicing": 1.54}, "inception_v4": {"slicing": 1.29}}
"""Figure 5.4: over traditional backpropagation, which computes and sends in turn. Its text has no
numbers of the other bars of one optimization."""
THESIS_SPEED_UPS = {"resnet110": {"p3kv_all": 3.91}, "inception_v4": {"p3kv_all": 3.78}}
"""Figure 5.4: over one machine."""
_USED = {"accelerator": "accelerator\n(emulated)", "in": "link, in", "out": "link, out"}


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each model, number of hosts and system: the speed-up, the gain over `BASELINE`, and
    the shares of time that the accelerator computes and of the link's rate, where they are known.

    An iteration's time is the mean of a run's, since iterations of one rule differ.
    """
    rows = []
    for model in MODELS:
        of_model = curves.select(runs, model=model)
        for hosts in sorted({run["hosts"] for run in of_model}, reverse=True):
            baseline: Optional[float] = None
            for system in COMPARED:
                of = curves.select(of_model, hosts=hosts, system=system)
                limited = [run for run in of if run["rate_mbit_s"] is not None]
                if not limited:
                    continue
                taken = Spread.of([hosts * _computing(run) for run in limited])
                if system == BASELINE:
                    baseline = taken.median
                gains = THESIS_GAINS[model] if hosts == HOSTS else {}
                speed_ups = THESIS_SPEED_UPS[model] if hosts == HOSTS else {}
                rows.append(
                    {
                        "model": model,
                        "hosts": hosts,
                        "system": system,
                        "ratio": RATIOS[model],
                        "speed_up": taken._asdict(),
                        "gain": round(taken.median / baseline, 3) if baseline else None,
                        "thesis_gain": gains.get(system),
                        "thesis_speed_up": speed_ups.get(system),
                        "unlimited_efficiency": _unlimited(of),
                        "used": _used(limited),
                    }
                )
    return rows


def _computing(run: Mapping[str, Any]) -> float:
    """C by the mean time of an iteration, which is the share of time that the accelerator computes.

    Records that do not have the slowest worker's time have the slowest iterations.
    """
    total_s = run.get("total_s", sum(run["iteration_s"]))
    return float(run["compute_s"] * len(run["iteration_s"]) / total_s)


def _unlimited(runs: Sequence[Mapping[str, Any]]) -> Optional[float]:
    found = [_computing(run) for run in runs if run["rate_mbit_s"] is None]
    return round(Spread.of(found).median, 4) if found else None


def _used(runs: Sequence[Mapping[str, Any]]) -> Optional[Dict[str, float]]:
    """Of the last run whose traffic was counted."""
    counted = [run for run in runs if "used" in run]
    if not counted:
        return None
    return {"accelerator": round(_computing(counted[-1]), 4), **counted[-1]["used"]}


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        taken, free, used = row["speed_up"], row["unlimited_efficiency"], row["used"]
        lines.append(
            f"{row['model']:12} {row['hosts']} hosts {COMPARED[row['system']][0]:36} speed-up "
            f"{taken['median']:.2f} ({taken['low']:.2f} to {taken['high']:.2f})"
            + (f", gain {row['gain']:.2f}" if row["gain"] else "")
            + (f", thesis's gain {row['thesis_gain']:.2f}" if row["thesis_gain"] else "")
            + (f", thesis {row['thesis_speed_up']:.2f}" if row["thesis_speed_up"] else "")
            + (f", efficiency without a limit {free:.3f}" if free is not None else "")
            + (f", used {', '.join(f'{n} {v:.2f}' for n, v in used.items())}" if used else "")
        )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """Figures 5.4 to 5.6: bars of speed-ups with the thesis's as marks, speed-ups by number of
    hosts, and bars of shares."""
    output.style()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), width_ratios=(2.1, 1, 1.7))
    _draw_speed_ups(axes[0], [row for row in table if row["hosts"] == HOSTS])
    of_scaled = [row for row in table if row["model"] == SCALED_MODEL]
    _draw_scaling(axes[1], [row for row in of_scaled if row["system"] in SCALED])
    _draw_used(axes[2], [row for row in of_scaled if row["hosts"] == HOSTS and row["used"]])
    curves.foot(figure, said)
    return figure


def _draw_speed_ups(axis: Axes, table: Sequence[Mapping[str, Any]]) -> None:
    values: Dict[str, Dict[str, Spread]] = {}
    label: Optional[str] = "the thesis: wait-free by its gain, all by its speed-up"
    for row in table:
        taken = Spread(**row["speed_up"])
        group = values.setdefault(f"{curves.TITLES[row['model']]}\nM/C = {row['ratio']:g}", {})
        group[COMPARED[row["system"]][0]] = taken
        height = row["thesis_speed_up"]
        if row["thesis_gain"] and row["gain"]:
            height = taken.median / row["gain"] * row["thesis_gain"]
        if height:
            place = list(COMPARED).index(row["system"]) - (len(COMPARED) - 1) / 2
            at = len(values) - 1 + 0.85 / len(COMPARED) * (place + 0.33)
            axis.plot(at, height, "D", color="black", markersize=4, label=label)
            label = None
    bars.groups(axis, values, dict(COMPARED.values()))
    axis.axhline(HOSTS, color="black", linewidth=0.8)
    axis.set_ylim(0, HOSTS * 1.55)
    axis.set_ylabel("speed-up over one machine")
    axis.set_title(f"5.4: {HOSTS} hosts")
    axis.legend(fontsize=7, ncols=2, loc="upper right")


def _draw_scaling(axis: Axes, table: Sequence[Mapping[str, Any]]) -> None:
    every = range(1, HOSTS + 1)
    axis.plot(every, every, ":", color="black", linewidth=1, label="linear")
    for system in SCALED:
        found = {r["hosts"]: r["speed_up"]["median"] for r in table if r["system"] == system}
        if found:
            at = sorted({1: 1.0, **found}.items())
            title, colour = COMPARED[system]
            axis.plot(*zip(*at), marker="o", markersize=4, color=colour, label=title)
    axis.set_xticks(every)
    axis.set_xlabel("hosts")
    axis.set_title(f"5.5: {curves.TITLES[SCALED_MODEL]}")
    axis.legend(fontsize=7, loc="upper left")


def _draw_used(axis: Axes, table: Sequence[Mapping[str, Any]]) -> None:
    values = {
        title: {COMPARED[row["system"]][0]: Spread.of([row["used"][name]]) for row in table}
        for name, title in _USED.items()
    }
    measured = [COMPARED[row["system"]] for row in table]
    if measured:
        bars.groups(axis, values, dict(measured))
    axis.set_ylim(0, 1.1)
    axis.set_title(f"5.6: {curves.TITLES[SCALED_MODEL]}, part of the time or the rate in use")
