"""Figure 12 of P3: throughput against the size of slices, measured and simulated.

python -m experiments.figure12
"""

from __future__ import annotations

import argparse
import string
from typing import Any, List, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from experiments.campaign import options
from experiments.campaign.campaign import Campaign, Point, point
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure, output
from experiments.drawing.by_slice_size import SETTING, limited, summarize, table_text

FIGURE_MODELS = ("resnet50", "vgg19")
SLICE_ELEMS = (5_000, 10_000, 25_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_QUICK_SLICE_ELEMS = (10_000, 50_000, 200_000, 1_000_000)
_PAPER_ELEMS = 50_000
_ABOUT = {
    "figure": "P3 figure 12: throughput against the size of slices, p3kv",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated",
}


def points(chosen: argparse.Namespace, ratio: Optional[float]) -> List[Point]:
    """Returns a point for each model and size of slices; without a ratio, without a limit."""
    return [
        point(
            model, chosen.hosts, ratio, chosen.dilation[model], ("p3kv",), chosen.iterations,
            **{SETTING: elems},
        )
        for model in chosen.models
        for elems in chosen.slices
    ]  # fmt: skip


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures all sizes, first once without a limit on the links.

    Small slices cost processor time: these runs show whether the machine has it.
    """
    campaign.measure(points(chosen, None), 1, chosen.retry)
    campaign.measure(points(chosen, chosen.ratio), chosen.repetitions or 1, chosen.retry)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """Draws `summarize`'s table."""
    output.style()
    figure, axes = plt.subplots(
        1, len(table), figsize=(max(4.6 * len(table), 5.5), 3.8), squeeze=False
    )
    for letter, axis, row in zip(string.ascii_lowercase, axes.flat, table):
        _draw_setup(axis, letter, row)
    curves.legend(axes.flat, axes[0, 0], loc="lower center")
    curves.foot(figure, said)
    return figure


def _draw_setup(axis: Axes, letter: str, row: Mapping[str, Any]) -> None:
    sizes = row["sizes"]
    elems = [size["slice_elems"] for size in sizes]
    axis.axhline(
        row["bound"], color=output.COLOURS["bound"], linewidth=1, label="bound: none is faster"
    )
    colour = curves.LOOKS["p3kv"].colour
    simulated = [size["simulated"] for size in sizes]
    axis.plot(elems, simulated, "--", color=colour, linewidth=1, label="p3kv, simulated")
    values = [curves.Spread(**size["measured"]) for size in sizes]
    curves.draw_spread(axis, "p3kv", elems, values, label="p3kv, measured")
    weak = [(size["slice_elems"], size["measured"]["median"]) for size in sizes if limited(size)]
    if weak:
        axis.plot(
            *zip(*weak), "o", markersize=9, markerfacecolor="none", linestyle="",
            color=output.COLOURS["emphasis"], label="limited by this machine",
        )  # fmt: skip
    axis.axvline(_PAPER_ELEMS, color="#999999", linewidth=0.8, linestyle=":")
    axis.annotate(
        "the paper's best", (_PAPER_ELEMS, 1.0), xycoords=("data", "axes fraction"),
        xytext=(3, -2), textcoords="offset points", va="top", fontsize=7, color="#555555",
    )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks(elems, [f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k" for n in elems])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("elements in a slice, at most")
    axis.set_ylabel("samples/s, all hosts")
    # From nought, a few per cent would not be seen.
    low = min(simulated + [value.low for value in values]) / row["bound"]
    axis.set_ylim(row["bound"] * (0.0 if low < 0.6 else 0.5), row["bound"] * 1.1)
    axis.set_title(
        f"({letter}) {curves.TITLES[row['model']]}, {row['hosts']} hosts,"
        f" {row['rate_mbit_s']:.0f} Mbit/s\nM/C = {row['ratio']:.2g}",
        fontsize=9,
    )


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], FIGURE_MODELS)
    parser.add_argument("--slices", nargs="+", type=int, metavar="ELEMENTS")
    parser.add_argument("--ratio", type=float, default=1.0, metavar="M/C")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    chosen.slices = chosen.slices or (_QUICK_SLICE_ELEMS if chosen.quick else SLICE_ELEMS)
    measured_figure.make(
        "figure12", _ABOUT, chosen, measure, summarize, table_text,
        lambda records: draw(records.summary, curves.remarks(records.runs, records.links)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
