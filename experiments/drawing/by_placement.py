"""Speed-ups and servers' loads by placement, beside how large a model's arrays are.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.campaign.placing import loads_elems
from experiments.drawing import bars, curves, output
from experiments.drawing.curves import Spread
from experiments.models import THESIS_MODELS, load

HOSTS = 4
SETTING = "P3KV_PLACEMENT"
RATIOS = {"googlenet": 3.99, "resnet110": 1.17, "inception_v4": 3.14}
"""M/C of the thesis's machines, by `experiments.models`."""


class Compared(NamedTuple):
    """A placement by its name here and in p3kv, the order in which keys are declared, a colour."""

    title: str
    placement: str
    largest_first: bool
    colour: str

    def model(self, name: str) -> str:
        """The model whose keys are declared in that order."""
        return f"{name}_largest_first" if self.largest_first else name


COMPARED = (
    Compared("round robin", "whole_round_robin", False, output.COLOURS["baseline"]),
    Compared("uniform split", "uniform_split", False, output.COLOURS["slicing"]),
    Compared("heuristic, largest first", "whole_tensors", True, "#009E73"),
    Compared("p3kv's own", "by_link", False, output.COLOURS["p3"]),
)


def variation(loads: Sequence[int]) -> float:
    """The coefficient of variation: standard deviation by mean."""
    return statistics.pstdev(loads) / statistics.mean(loads)


def most_speed_up(name: str, loads: Sequence[int]) -> float:
    """The speed-up at which the busiest link carries what it must, or nothing is waited for.

    A host with a part x of the model carries 1 - x and (hosts - 1) x of it in each direction.
    """
    busiest = 1 + (HOSTS - 2) * max(loads) / sum(loads)
    equal = 2 * (HOSTS - 1) / HOSTS
    return HOSTS / max(1.0, RATIOS[name] * busiest / equal)


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each model and placement: the servers' loads, and the speed-up if measured."""
    rows = []
    for name in THESIS_MODELS:
        for of in COMPARED:
            at = {"model": of.model(name)}
            found = [
                run for run in curves.select(runs, **at) if run["settings"][SETTING] == of.placement
            ]
            limited = [run for run in found if run["rate_mbit_s"] is not None]
            free = [run for run in found if run["rate_mbit_s"] is None]
            loads = loads_elems(of.placement, of.model(name), HOSTS)
            rows.append(
                {
                    "model": name,
                    "placement": of.title,
                    "ratio": RATIOS[name],
                    "loads_elems": loads,
                    "variation": round(variation(loads), 4),
                    "most_speed_up": round(most_speed_up(name, loads), 3),
                    "speed_up": curves.speed_up(limited)._asdict() if limited else None,
                    "unlimited_efficiency": curves.unlimited(free).get("p3kv"),
                }
            )
    return rows


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = [f"{'':12} {'M/C':>5} {'':24} {'variation':>9} {'speed-up':>20} {'at most':>8}"]
    for row in table:
        taken, free = row["speed_up"], row["unlimited_efficiency"]
        measured = (
            f"{taken['median']:6.2f} ({taken['low']:.2f} to {taken['high']:.2f})" if taken else "-"
        )
        lines.append(
            f"{row['model']:12} {row['ratio']:>5} {row['placement']:24} {row['variation']:>9.3f} "
            f"{measured:>20} {row['most_speed_up']:>8.2f}"
            + (f"  efficiency without a limit {free:.3f}" if free is not None else "")
        )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """Speed-ups, sizes of arrays, and variations: the thesis's figures 5.1, 5.2 and 5.3."""
    output.style()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    looks = {of.title: of.colour for of in COMPARED}
    speed_ups = {
        _title(row): {r["placement"]: Spread(**r["speed_up"]) for r in _of(table, row)}
        for row in table
        if all(r["speed_up"] for r in _of(table, row))
    }
    bars.groups(axes[0], speed_ups, looks)
    axes[0].set_title(f"5.1: speed-up on {HOSTS} hosts over one machine", fontsize=9)
    axes[0].set_ylim(0, axes[0].get_ylim()[1] * 1.4)  # room for the legend
    axes[0].axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=7)
    _draw_sizes(axes[1])
    variations = {
        _title(row): {r["placement"]: Spread.of([r["variation"]]) for r in _of(table, row)}
        for row in table
    }
    bars.groups(axes[2], variations, looks)
    axes[2].set_title("5.3: coefficient of variation of servers' loads", fontsize=9)
    curves.foot(figure, said)
    return figure


def _of(table: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> List[Mapping[str, Any]]:
    return [other for other in table if other["model"] == row["model"]]


def _title(row: Mapping[str, Any]) -> str:
    return f"{curves.TITLES[row['model']]}\nM/C = {row['ratio']:g}"


def _draw_sizes(axis: Axes) -> None:
    for name, line in zip(THESIS_MODELS, ("-", "--", ":")):
        sizes = sorted(parameter.elems for parameter in load(name).parameters)
        shares = [(place + 1) / len(sizes) for place in range(len(sizes))]
        label = f"{curves.TITLES[name]}: {len(sizes)} arrays, {sum(sizes) / 1e6:.2f} million"
        axis.step(sizes, shares, line, where="post", color="black", linewidth=1.2, label=label)
    axis.set_xscale("log")
    axis.set_xlabel("elements of an array")
    axis.set_title("5.2: part of a model's arrays with at most so many elements", fontsize=9)
    axis.set_ylim(0, 1.25)
    axis.legend(fontsize=7, loc="upper left")
