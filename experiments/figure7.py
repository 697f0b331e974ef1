"""Figure 7 of P3: throughput against bandwidth, four models, all systems, and the bounds.

python -m experiments.figure7
"""

from __future__ import annotations

import argparse
import string
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from experiments.campaign import options
from experiments.campaign.campaign import UNLIMITED_SYSTEMS, Campaign, Point, expected_s, point
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure, output
from experiments.drawing.by_bandwidth import (
    Setup,
    bounds_s,
    measured,
    ratio_of,
    setups,
    summarize,
    table_text,
)
from experiments.emulation.systems import SYSTEMS, USUAL
from experiments.models import MODELS, load

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
COMPARED_REPETITIONS = 3
"""How often each system runs where M is C, unless told: that is where priorities gain most."""

_SAME_RATIO = 0.01  # rates are rounded
_QUICK_SYSTEMS = ("dist_sync", "mxnet_p3", "p3kv")
_ABOUT = {
    "figure": "P3 figure 7: throughput against bandwidth",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated",
}


def points(chosen: argparse.Namespace) -> List[Point]:
    """Returns what is to be measured; the unlimited points come first."""
    made = []
    for model in chosen.models:
        dilation = chosen.dilation[model]
        for ratio in (None, *chosen.ratios):
            systems = UNLIMITED_SYSTEMS if ratio is None else chosen.systems
            made.append(point(model, chosen.hosts, ratio, dilation, systems, chosen.iterations))
    return made


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures all points, and those where M is C more often."""
    todo = points(chosen)
    compared = [at for at in todo if abs(at.wire_s / at.compute_s - 1) < _SAME_RATIO]
    often = chosen.repetitions or 1
    more_often = chosen.repetitions or (1 if chosen.quick else COMPARED_REPETITIONS)
    seconds = expected_s(todo, often, chosen.warm_up)
    seconds += expected_s(compared, more_often - often, chosen.warm_up)
    told = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    print(f"all runs together, from the first on, take about {told}")
    campaign.measure(todo, often, chosen.retry)
    campaign.measure(compared, more_often, chosen.retry)


def draw(records: Records) -> Figure:
    """Draws everything that the records have."""
    output.style()
    panels = setups(records.runs)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 3.9 * rows + 0.2), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for letter, axis, setup in zip(string.ascii_lowercase, axes.flat, panels):
        _draw_setup(axis, letter, setup, records.runs)
    curves.legend(axes.flat[: len(panels)], axes.flat[0], loc="lower right")
    curves.foot(figure, curves.remarks(records.runs, records.links))
    return figure


def _draw_setup(axis: Axes, letter: str, setup: Setup, runs: Sequence[Mapping[str, Any]]) -> None:
    samples = curves.samples(setup.model, setup.hosts)
    times = measured(runs, setup)
    rates = sorted({rate for by_rate in times.values() for rate in by_rate})
    for system, by_rate in times.items():
        values = [curves.throughput(seconds, samples) for seconds in by_rate.values()]
        curves.draw_spread(axis, system, list(by_rate), values, label=SYSTEMS[system].title)
    if rates:
        _draw_bounds(axis, setup, rates, samples)
        _name_rates(axis, setup, rates)
    compute_s = load(setup.model).compute_s * setup.dilation
    axis.set_title(
        f"({letter}) {curves.TITLES[setup.model]}, {setup.hosts} hosts, C = {compute_s:.3g} s",
        fontsize=9,
    )
    axis.set_ylabel("samples/s, all hosts")
    axis.set_ylim(0, samples / compute_s * 1.22)
    unlimited = curves.unlimited(runs, **setup._asdict())
    axis.text(
        0.015, 0.985, curves.unlimited_text(unlimited), transform=axis.transAxes, va="top",
        fontsize=7, color=output.COLOURS["emphasis"] if curves.limited(unlimited) else "#555555",
    )  # fmt: skip


def _draw_bounds(axis: Axes, setup: Setup, rates: Sequence[float], samples: int) -> None:
    # At the same rates as what was measured: between two of them straight lines say nothing, and a
    # curve's would seem to be passed where it is bent. One rate needs a curve to be judged by.
    places = rates if len(rates) > 1 else np.geomspace(*_shown(rates), 200)
    bounds = [bounds_s(setup, rate) for rate in places]
    for name, line, label in (
        ("best", "-", "bound: no schedule is faster"),
        ("fifo", ":", "ideal first in, first out"),
    ):
        axis.plot(
            places, [samples / at[name] for at in bounds], line, color=output.COLOURS["bound"],
            linewidth=1, label=label, zorder=1,
        )  # fmt: skip


def _name_rates(axis: Axes, setup: Setup, rates: Sequence[float]) -> None:
    """Names the measured rates below, and M/C above."""
    axis.set_xscale("log")
    axis.set_xlim(*_shown(rates))
    axis.set_xticks(rates, [f"{rate:.0f}" for rate in rates])
    axis.set_xlabel("link, Mbit/s in each direction")
    # On the same scale: what is proportional to 1/rate needs names only, not places of its own.
    above = axis.twiny()
    above.set_xscale("log")
    above.set_xlim(axis.get_xlim())
    above.set_xticks(rates, [f"{ratio_of(setup, rate):.2g}" for rate in rates])
    above.set_xlabel("M/C", fontsize=8, labelpad=3)
    above.spines["top"].set_visible(True)
    for each in (axis, above):
        each.xaxis.set_minor_locator(NullLocator())
        each.xaxis.set_minor_formatter(NullFormatter())
        each.tick_params(axis="x", labelsize=8)


def _shown(rates: Sequence[float]) -> Tuple[float, float]:
    """The rates between which is drawn: a single one needs bounds around it to be judged by."""
    margin = 1.1 if len(rates) > 1 else 4.0
    return rates[0] / margin, rates[-1] * margin


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(
        __doc__.splitlines()[0], MODELS, f"1, where M is C {COMPARED_REPETITIONS}, quick: 1"
    )
    parser.add_argument(
        "--ratios", nargs="+", type=float, metavar="M/C",
        help=f"rates, by M/C; default: {' '.join(f'{r:g}' for r in RATIOS)}, quick: 1",
    )  # fmt: skip
    options.add_systems(parser, USUAL)
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    chosen = options.parse(parser, argv, MODELS)
    chosen.ratios = chosen.ratios or ([1.0] if chosen.quick else RATIOS)
    chosen.systems = chosen.systems or (_QUICK_SYSTEMS if chosen.quick else USUAL)
    measured_figure.make(
        "figure7",
        _ABOUT,
        chosen,
        measure,
        lambda records: summarize(records.runs),
        table_text,
        draw,
    )


if __name__ == "__main__":
    main()
