"""Draws predictions: samples a second by bandwidth, and by number of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from p3kv.common.words import counted
from p3kv.report.verdict import bit_rate
from p3kv.tools.plan.predictions import Prediction, Series, Store, stores

_STYLES: Tuple[Dict[str, Any], ...] = (
    {"color": "tab:red", "marker": "s"},
    {"color": "tab:orange", "marker": "^"},
    {"color": "tab:blue", "marker": "o"},
    {"color": "0.8", "linewidth": 6, "zorder": 1},
)
"""By store, in the order of the table."""


def draw(series: Series, model: str, path: Path) -> None:
    """Writes the picture. Raises OSError, and ValueError for a name whose ending says no format."""
    asked = series.asked
    compared = stores(asked.own)
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    _lines(left, compared, series.curve(), lambda one: one.link_bit_s, lambda one: 1)
    left.axvline(asked.link_bit_s, color="0.85", zorder=0)
    left.set_xticks([one.link_bit_s for one in series.by_bandwidth])
    left.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: bit_rate(rate / 8)))
    left.set_xlabel("bandwidth of each host's link, in each direction")
    left.set_ylabel("samples/s of all hosts")
    left.set_title(counted(asked.hosts, "host"), fontsize=10)

    _lines(
        right, compared, series.by_hosts, lambda one: one.hosts, lambda one: one.hosts,
        markers=True,
    )  # fmt: skip
    at_best = [one for one in series.by_hosts if one.takes_dist_sync_as_balanced]
    if at_best:
        dist_sync, colour = compared[0], _STYLES[0]["color"]
        right.plot(
            [one.hosts for one in at_best],
            [one.samples_s(dist_sync) / one.hosts for one in at_best],
            linestyle="", marker="s", markerfacecolor="white", color=colour,
            label="dist_sync if it were balanced", zorder=4,
        )  # fmt: skip
    right.axvline(asked.hosts, color="0.85", zorder=0)
    right.set_xticks([one.hosts for one in series.by_hosts])
    right.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:.0f}"))
    right.set_xlabel("hosts")
    right.set_ylabel("samples/s of each host")
    right.set_title(bit_rate(asked.link_bit_s / 8), fontsize=10)

    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"{model}, {series.batch_size} samples in {series.workload.compute_s:.3g} s on each host "
        "(simulated; processors cost nothing)",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _lines(
    axes: Axes,
    compared: Sequence[Store],
    shown: List[Prediction],
    where: Callable[[Prediction], float],
    divisor: Callable[[Prediction], int],
    markers: bool = False,
) -> None:
    """A line for each store, `where` across, and samples a second by `divisor` upwards."""
    axes.set_xscale("log", base=2)
    at = [where(one) for one in shown]
    for store, style in zip(compared, _STYLES):
        drawn = style if markers else {**style, "marker": ""}
        axes.plot(
            at, [one.samples_s(store) / divisor(one) for one in shown], label=store.name, **drawn
        )
    computing = [one.computing_samples_s / divisor(one) for one in shown]
    axes.plot(at, computing, color="0.5", linestyle="--", label="never waiting", zorder=1)
