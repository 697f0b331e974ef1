"""Bars of several systems at several places, with bounds; a panel for each model."""

from __future__ import annotations

from typing import Any, Callable, Dict, Hashable, Mapping, Sequence, Tuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import curves, output

_APART = 0.27


def draw(
    table: Sequence[Dict[str, Any]],
    systems: Mapping[str, Tuple[str, str]],
    place: Callable[[Dict[str, Any]], Hashable],
    place_name: Callable[[Any], str],
    places_title: str,
    rate_mbit_s: Callable[[str], float],
) -> Figure:
    """Draws iteration times of a figure's table.

    `systems` are drawn from left to right: by name, a title and whose look it has in other figures.
    Bars whose rows have the same `place` stand together. Rows of p3kv have the bounds.
    """
    output.style()
    models = list(dict.fromkeys(row["model"] for row in table))
    figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 3.6), squeeze=False)
    for axis, model in zip(axes.flat, models):
        of = [row for row in table if row["model"] == model]
        places = list(dict.fromkeys(map(place, of)))
        for row in of:
            at, taken = places.index(place(row)), row["iteration_s"]
            title, look = systems[row["system"]]
            axis.bar(
                at + _APART * (list(systems).index(row["system"]) - 1), taken["median"], 0.25,
                color=curves.LOOKS[look].colour,
                label=title if at == len(places) - 1 else None,
                yerr=[[taken["median"] - taken["low"]], [taken["high"] - taken["median"]]],
            )  # fmt: skip
            if row["system"] == "p3kv":
                label = "bound" if at == 0 else None
                axis.hlines(row["bound_s"], at - 0.45, at + 0.45, "black", label=label)
        axis.set_xticks(range(len(places)), [place_name(one) for one in places])
        axis.set_xlabel(places_title)
        axis.set_ylabel("seconds of an iteration")
        axis.set_title(f"{curves.TITLES[model]}, {rate_mbit_s(model):g} Mbit/s", fontsize=9)
    axes.flat[0].legend(fontsize=7)
    curves.foot(figure, [])
    return figure


def groups(
    axis: Axes, values: Mapping[str, Mapping[str, curves.Spread]], colours: Mapping[str, str]
) -> None:
    """Draws a group of bars for each of `values`, with each bar's median above it.

    `colours` are those of all bars by name, from left to right; a group may lack some.
    """
    width = 0.85 / len(colours)
    for at, (name, colour) in enumerate(colours.items()):
        places = [place for place, group in enumerate(values.values()) if name in group]
        found = [group[name] for group in values.values() if name in group]
        below = [one.median - one.low for one in found]
        above = [one.high - one.median for one in found]
        drawn = axis.bar(
            [place + width * (at - (len(colours) - 1) / 2) for place in places],
            [one.median for one in found],
            width * 0.92,
            color=colour,
            label=name,
            yerr=[below, above],
        )
        axis.bar_label(drawn, [f"{one.median:.2f}" for one in found], fontsize=6, padding=1)
    axis.set_xticks(range(len(values)), values)
