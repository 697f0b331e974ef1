"""What the simulated pipelines look like beside data parallelism."""

from __future__ import annotations

import math
from typing import Any, Dict, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from experiments.drawing import bars, curves, output
from experiments.dualpipe.comparison import TITLES, pipelines
from experiments.dualpipe.partition import Stage
from experiments.dualpipe.pipeline import Computed, simulate

_COLOURS = {
    "dist_sync": curves.LOOKS["dist_sync"].colour,
    "p3kv": curves.LOOKS["p3kv"].colour,
    "p3kv_own": curves.LOOKS["horovod"].colour,
    "pipedream_units": output.COLOURS["baseline"],
    "pipedream": output.COLOURS["slicing"],
    "dualpipe": output.COLOURS["emphasis"],
}
"""By name, the systems that are drawn, from left to right."""
_PASSES = {"forward": "#88CCEE", "backward": "#DDCC77"}
"""The paper's cyan and yellow, of Paul Tol's."""
_PARTS = {
    "compute_s": ("computing", output.COLOURS["plain"]),
    "transfer_s": ("waits for transfers", output.COLOURS["emphasis"]),
    "imbalance_s": ("waits for slower workers", output.COLOURS["baseline"]),
}


_BACKWARD, _UNTIL, _MARKED = 2.0, 42.0, 5
"""How long the drawn backward passes take, when the drawing ends, and whose round trip stands out;
a forward pass takes 1."""


def timelines(workers: int) -> Figure:
    """Figure 6: the schedules of equal stages, whose transfers take no time."""
    output.style()
    drawn = {name: plan for name, plan in pipelines(workers).items() if name in _COLOURS}
    figure, axes = plt.subplots(len(drawn), figsize=(10, 1.9 * len(drawn) + 0.5), sharex=True)
    for axis, (name, plan) in zip(axes, drawn.items()):
        done = simulate(plan, [Stage(1, 1.0, _BACKWARD, 0)] * workers, math.inf)
        _draw_schedule(axis, [one for one in done if one.start_s < _UNTIL], workers)
        axis.set_title(TITLES[name], loc="left")
    axes[-1].set_xlabel("time (a forward pass = 1)")
    handles = [Patch(color=colour, label=f"{kind} pass") for kind, colour in _PASSES.items()]
    label = f"round trip of batch {_MARKED}"
    handles.append(Patch(facecolor="none", edgecolor="black", label=label))
    handles.append(Line2D([], [], color="black", linestyle=":", label="a time unit ends"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_schedule(axis: Axes, done: Sequence[Computed], workers: int) -> None:
    ends: Dict[int, float] = {}
    for worker, step, start_s, end_s in done:
        ends[step.unit] = max(ends.get(step.unit, 0.0), end_s)
        marked = step.batch == _MARKED
        axis.barh(
            worker, end_s - start_s, left=start_s, height=0.86, color=_PASSES[step.kind],
            edgecolor="black" if marked else "white", linewidth=1.4 if marked else 0.5,
            zorder=3 if marked else 2,
        )  # fmt: skip
        axis.text(
            (start_s + end_s) / 2, worker, str(step.batch), ha="center", va="center",
            fontsize=7, fontweight="bold" if marked else None, zorder=5, clip_on=True,
        )  # fmt: skip
    axis.vlines(
        [*ends.values()] if len(ends) > 1 else [], -0.5, workers - 0.5,
        color="black", linewidth=0.8, linestyles="dotted", zorder=4,
    )  # fmt: skip
    axis.set_xlim(0, _UNTIL)
    axis.set_ylim(workers - 0.5, -0.5)
    axis.set_yticks(range(workers), [f"worker {worker}" for worker in range(workers)])
    axis.grid(visible=False)


def transfers(rows: Sequence[Dict[str, Any]]) -> Figure:
    """Figure 3: bytes over all links for a batch."""
    output.style()
    figure, axis = plt.subplots(figsize=(8, 3.8))
    for at, (name, title) in enumerate(
        (("data_parallel_bytes", "data parallelism"), ("pipeline_bytes", "pipeline"))
    ):
        drawn = axis.bar(
            [place + 0.4 * (at - 0.5) for place in range(len(rows))],
            [row[name] / 1e6 for row in rows],
            0.38,
            color=(_COLOURS["p3kv"], _COLOURS["dualpipe"])[at],
            label=title,
        )
        axis.bar_label(drawn, [f"{row[name] / 1e6:,.0f}" for row in rows], fontsize=7, padding=1)
    axis.set_xticks(
        range(len(rows)),
        [
            f"{curves.TITLES[row['model']]}\n"
            f"{row['data_parallel_bytes'] / row['pipeline_bytes']:.3g} times"
            for row in rows
        ],
        fontsize=8,
    )
    axis.set_yscale("log")
    axis.set_ylabel("MB for a batch, over all links")
    axis.set_title(
        f"{rows[0]['workers']} workers, partitioned for M/C = {_fraction(rows[0]['ratio'])}; "
        "how many times as much data parallelism sends",
        fontsize=9,
    )
    axis.legend(loc="upper left", fontsize=8)
    axis.set_ylim(1, 2e4)
    return figure


def throughput(rows: Sequence[Dict[str, Any]]) -> Figure:
    """Figure 10: a panel for each number of workers, a group of bars for each model."""
    output.style()
    counts = sorted({row["workers"] for row in rows})
    figure, axes = plt.subplots(len(counts), figsize=(10, 2.9 * len(counts)), squeeze=False)
    for axis, workers in zip(axes.flat, counts):
        of = [row for row in rows if row["workers"] == workers]
        values = {
            curves.TITLES[row["model"]]: {
                TITLES[name]: curves.Spread(*[row["systems"][name]["speed_up"]] * 3)
                for name in _COLOURS
            }
            for row in of
        }
        bars.groups(axis, values, {TITLES[name]: colour for name, colour in _COLOURS.items()})
        axis.axhline(1, color="#666666", linewidth=0.8, zorder=0.8)
        axis.set_ylim(0, workers * 1.08)
        axis.set_ylabel("samples/s, one worker's = 1")
        axis.set_title(f"{workers} workers, M/C = {of[0]['ratio']:g}", loc="left")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def breakdown(rows: Sequence[Dict[str, Any]]) -> Figure:
    """Figure 11: the time of a batch, by that of `dist_sync`; a panel for each model."""
    output.style()
    figure, axes = plt.subplots(
        1, len(rows), figsize=(1.6 * len(rows) + 0.6, 4.4), sharey=True, squeeze=False
    )
    for axis, row in zip(axes.flat, rows):
        whole_s = sum(row["systems"]["dist_sync"][part] for part in _PARTS)
        below = [0.0] * len(_COLOURS)
        for part, (label, colour) in _PARTS.items():
            heights = [row["systems"][name][part] / whole_s for name in _COLOURS]
            axis.bar(range(len(_COLOURS)), heights, 0.8, below, color=colour, label=label)
            below = [low + height for low, height in zip(below, heights)]
        axis.set_xticks(
            range(len(_COLOURS)), [TITLES[name] for name in _COLOURS], rotation=90, fontsize=7.5
        )
        axis.set_title(curves.TITLES[row["model"]], fontsize=9)
    axes.flat[0].set_ylabel("time of a batch, dist_sync's = 1")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_PARTS), frameon=False)
    figure.suptitle(f"{rows[0]['workers']} workers, M/C = {rows[0]['ratio']:g}", fontsize=10)
    return figure


def by_link(rows: Sequence[Dict[str, Any]]) -> Figure:
    """Throughput against M/C; a panel for each model."""
    output.style()
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = -(-(len(models) + 1) // 2)
    figure, axes = plt.subplots(2, columns, figsize=(2.6 * columns, 5.4), sharex=True, sharey=True)
    for axis, model in zip(axes.flat, models):
        _draw_model(axis, [row for row in rows if row["model"] == model])
        axis.set_title(curves.TITLES[model])
    for axis in axes.flat[len(models) :]:
        axis.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[len(models)].legend(handles, labels, loc="center", frameon=False, fontsize=8)
    figure.supxlabel("M/C", fontsize=9)
    figure.supylabel(f"samples/s of {rows[0]['workers']} workers, one worker's = 1", fontsize=9)
    return figure


def _draw_model(axis: Axes, rows: Sequence[Dict[str, Any]]) -> None:
    ratios = [row["ratio"] for row in rows]
    for name, colour in _COLOURS.items():
        axis.plot(
            ratios, [row["systems"][name]["speed_up"] for row in rows], color=colour,
            linestyle="--" if name == "p3kv_own" else "-", marker=".", label=TITLES[name],
        )  # fmt: skip
    axis.axhline(1, color="#666666", linewidth=0.8, zorder=0.8)
    axis.set_xscale("log")
    ticks = ratios[::2]
    axis.set_xticks(ticks, [_fraction(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylim(0, rows[0]["workers"] * 1.05)


def _fraction(ratio: float) -> str:
    return f"1/{1 / ratio:.0f}" if ratio < 1 else f"{ratio:g}"
