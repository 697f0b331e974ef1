"""Efficiency by M/C of PyTorch's systems, beside the bound.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawing import curves, output
from experiments.drawing.by_bandwidth import Setup, bounds_s, measured, ratio_of, setups
from experiments.drawing.curves import Spread
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from p3kv.report.forecast import bound

OURS = "p3kv_torch"
DDP = ("ddp_25mb", "ddp_5mb", "ddp_1mb")


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each model, number of hosts and rate, from the fastest link on.

    `efficiency` is C by the time of an iteration, by system. `over_bound` is how much longer
    p3kv's iterations are than the bound, and `over_ddp` how many times as fast it is as DDP with
    the best of the buckets that were measured there.
    """
    return [row for setup in setups(runs) for row in _rows(setup, runs)]


def _rows(setup: Setup, runs: Sequence[Mapping[str, Any]]) -> Iterator[Dict[str, Any]]:
    times = measured(runs, setup)
    compute_s = load(setup.model).compute_s * setup.dilation
    unlimited = curves.unlimited(runs, **setup._asdict())
    for rate in sorted({rate for by_rate in times.values() for rate in by_rate}, reverse=True):
        at_rate = {system: by_rate[rate] for system, by_rate in times.items() if rate in by_rate}
        best_s = bounds_s(setup, rate)["best"]
        ours = at_rate.get(OURS)
        ddp = [at_rate[system].median for system in DDP if system in at_rate]
        yield {
            **setup._asdict(),
            "rate_mbit_s": rate,
            "ratio": round(ratio_of(setup, rate), 3),
            "bound": round(compute_s / best_s, 4),
            "efficiency": {
                system: curves.throughput(seconds, compute_s).rounded()
                for system, seconds in at_rate.items()
            },
            "repetitions": {
                system: len(curves.select(runs, **setup._asdict(), system=system, rate_mbit_s=rate))
                for system in at_rate
            },
            "over_bound": round(ours.median / best_s - 1, 4) if ours else None,
            "over_ddp": round(min(ddp) / ours.median, 3) if ours and ddp else None,
            "unlimited_efficiency": unlimited,
        }


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = ["Efficiency: C by the time of an iteration, median (least to greatest, repetitions)"]
    for row in table:
        lines.append(
            f"\n{curves.TITLES[row['model']]}, {row['hosts']} hosts, M/C = {row['ratio']:.2g}, "
            f"{row['rate_mbit_s']:g} Mbit/s"
        )
        lines.append(f"{'bound':34} {row['bound']:.3f}")
        for system, found in row["efficiency"].items():
            lines.append(
                f"{SYSTEMS[system].title:34} {found['median']:.3f} ({found['low']:.3f} to "
                f"{found['high']:.3f}, {row['repetitions'][system]})"
            )
        if row["over_bound"] is not None:
            lines.append(f"{'p3kv.torch takes more than the bound':44} {row['over_bound']:+.1%}")
        if row["over_ddp"] is not None:
            lines.append(f"{'and is so many times as fast as DDP':44} {row['over_ddp']:.2f}")
        lines.append(curves.unlimited_text(row["unlimited_efficiency"]).replace("\n", " "))
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """A panel for each model; `said` are remarks."""
    output.style()
    models = list(dict.fromkeys(row["model"] for row in table))
    figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 3.9), squeeze=False)
    for axis, model in zip(axes.flat, models):
        _draw_model(axis, [row for row in table if row["model"] == model])
    curves.legend(axes.flat, axes.flat[-1], loc="lower left")
    curves.foot(figure, said)
    return figure


def _draw_model(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for system in curves.LOOKS:
        of = [row for row in rows if system in row["efficiency"]]
        if of:
            values = [Spread(**row["efficiency"][system]) for row in of]
            ratios = [row["ratio"] for row in of]
            # No lines: between two points they would pass a bound that is bent.
            curves.draw_spread(axis, system, ratios, values, "", SYSTEMS[system].title)
    model, hosts = load(rows[0]["model"]), rows[0]["hosts"]
    ratios = np.geomspace(rows[0]["ratio"] / 1.2, rows[-1]["ratio"] * 1.2, 200)
    for name, line, label in (
        (bound.lower_bound_s, "-", "bound: no schedule is faster"),
        (bound.ideal_fifo_s, ":", "ideal first in, first out"),
    ):
        iteration_s = [
            name(
                model.layer_bytes, model.forward_s, model.backward_s, hosts,
                bound.link_for_ratio_bit_s(ratio, model.compute_s, model.size_bytes, hosts),
            )
            for ratio in ratios
        ]  # fmt: skip
        axis.plot(
            ratios, [model.compute_s / seconds for seconds in iteration_s], line,
            color=output.COLOURS["bound"], linewidth=1, label=label, zorder=1,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks(
        [row["ratio"] for row in rows], [f"{row['ratio']:.2g}" for row in rows], minor=False
    )
    axis.set_xticks([], minor=True)
    axis.set_xlabel("M/C")
    axis.set_ylabel("efficiency: C by the time of an iteration")
    axis.set_ylim(0, 1.05)
    axis.set_title(f"{curves.TITLES[rows[0]['model']]}, {hosts} hosts", fontsize=9)
