"""Figure 10 of P3: throughput of clusters of different sizes, measured and simulated.

python -m experiments.figure10
"""

from __future__ import annotations

import argparse
import string
import textwrap
from typing import Any, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from experiments.campaign import options
from experiments.campaign.campaign import DILATION, UNLIMITED_SYSTEMS, Campaign
from experiments.campaign.records import Records
from experiments.drawing import curves, measured_figure, output
from experiments.drawing.by_hosts import (
    SIMULATED,
    Setup,
    summarize,
    table_text,
    too_small_for,
    why_failed,
)
from experiments.emulation.systems import SYSTEMS

FIGURE_MODELS = ("resnet50", "vgg19", "sockeye")
HOSTS = (2, 4, 8, 16)
_DILATION = {**DILATION, "resnet50": 3.0}
"""Two cores carry 16 hosts with a limit, too: at ResNet-50's usual dilation they are 95 % busy."""

_SYSTEMS = ("dist_sync_apart", "dist_sync", "p3kv")
_SIMULATED_HOSTS = (2, 4, 8, 16, 32, 64, 128, 256)
_ABOUT = {
    "figure": "P3 figure 10: throughput against the number of hosts",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated. Dilation grows with "
    "the hosts, because one machine carries them all: the summary's samples/s have it undone",
}


def measure(records: Records, campaign: Campaign, chosen: argparse.Namespace) -> None:
    """Measures as many hosts as run on the machine, first without a limit on the links.

    These runs show which of them it carries; what it does not is flagged.
    """
    points = []
    for model in chosen.models:
        setup = Setup(model, chosen.dilation[model], chosen.congestion_control, chosen.ratio)
        for hosts in sorted(chosen.hosts):
            free = setup.point(hosts, False, UNLIMITED_SYSTEMS, chosen.iterations)
            campaign.measure([free], 1, chosen.retry)
            why = why_failed(records.runs, setup, hosts)
            if why is not None:
                print(f"{model}: {hosts} hosts do not run on this machine: {why}")
                break
            points.append(setup.point(hosts, True, chosen.systems, chosen.iterations))
    campaign.measure(points, chosen.repetitions or 1, chosen.retry)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """Draws `summarize`'s table: throughput above, the part of linear scaling below."""
    output.style()
    figure = plt.figure(figsize=(max(4.0 * len(table), 5.0), 6.9))
    grid = figure.add_gridspec(3, len(table), height_ratios=(0.13, 1, 1))
    axes = []
    for column, row in enumerate(table):
        above = figure.add_subplot(grid[1, column])
        below = figure.add_subplot(grid[2, column], sharex=above)
        above.tick_params(axis="x", labelbottom=False)
        axes += [above, below]
        for axis, linear in ((above, False), (below, True)):
            _draw_sizes(axis, row["sizes"], as_part=linear)
            axis.set_xscale("log", base=2)
        above.set_title(
            f"({string.ascii_lowercase[column]}) {curves.TITLES[row['model']]},"
            f" {row['undilated_link_mbit_s']:.0f} Mbit/s",
            fontsize=9,
        )
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter(ScalarFormatter())
        above.yaxis.set_minor_locator(NullLocator())
        below.set_ylim(0, 1.1)
        below.set_xticks([size["hosts"] for size in row["sizes"]])
        below.xaxis.set_major_formatter(ScalarFormatter())
        below.xaxis.set_minor_locator(NullLocator())
        below.set_xlim(row["sizes"][0]["hosts"] / 1.3, row["sizes"][-1]["hosts"] * 1.3)
        below.set_xlabel("hosts")
        below.text(
            0.03, 0.03, "\n".join(textwrap.fill(said, 60) for said in too_small_for(row)),
            transform=below.transAxes, fontsize=7, color=output.COLOURS["emphasis"],
        )  # fmt: skip
    axes[0].set_ylabel("samples/s, all hosts, if nothing were slowed")
    axes[1].set_ylabel("part of linear scaling")
    # A row of its own: lines that rise from corner to corner leave no room for it.
    names = figure.add_subplot(grid[0, :])
    names.axis("off")
    curves.legend(axes, names, loc="center", ncol=2 + len(table) // 2)
    curves.foot(figure, said)
    return figure


def _draw_sizes(axis: Axes, sizes: Sequence[Mapping[str, Any]], as_part: bool) -> None:
    def scale(size: Mapping[str, Any]) -> float:
        return 1 / size["linear"] if as_part else 1.0

    hosts = [size["hosts"] for size in sizes]
    for name, line, label in (("linear", "--", "linear"), ("bound", "-", "bound")):
        axis.plot(
            hosts, [size[name] * scale(size) for size in sizes], line, linewidth=1, zorder=1,
            color=output.COLOURS["bound"], label=label,
        )  # fmt: skip
    for system, simulated in SIMULATED.items():
        of = [size for size in sizes if system in size["simulated"]]
        axis.plot(
            [size["hosts"] for size in of],
            [size["simulated"][system] * scale(size) for size in of],
            color=simulated.colour, linewidth=1,
            label=f"{simulated.title}, simulated",
        )  # fmt: skip
    for system in curves.LOOKS:
        of = [size for size in sizes if system in size["measured"]]
        if of:
            values = [
                curves.Spread(**{k: v * scale(size) for k, v in size["measured"][system].items()})
                for size in of
            ]
            places = [size["hosts"] for size in of]
            curves.draw_spread(axis, system, places, values, "", SYSTEMS[system].title)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], FIGURE_MODELS, dilation=_DILATION)
    parser.add_argument("--hosts", nargs="+", type=int, metavar="N", help="default: 2 4 8 16")
    parser.add_argument(
        "--ratio", type=float, default=1.0, metavar="M/C",
        help="on four hosts; states the links' rate; default: %(default)s",
    )  # fmt: skip
    options.add_systems(parser, _SYSTEMS)
    parser.add_argument("--simulate-up-to", type=int, metavar="N", help="default: 256, quick: 64")
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    chosen.hosts = chosen.hosts or ((2, 4) if chosen.quick else HOSTS)
    chosen.systems = chosen.systems or (("dist_sync", "p3kv") if chosen.quick else _SYSTEMS)
    chosen.ratio = round(chosen.ratio, 2)
    largest = chosen.simulate_up_to or (64 if chosen.quick else 256)
    simulated_hosts = [hosts for hosts in _SIMULATED_HOSTS if hosts <= largest]
    measured_figure.make(
        "figure10", _ABOUT, chosen, measure,
        lambda records: summarize(records, simulated_hosts, chosen.ratio), table_text,
        lambda records: draw(records.summary, curves.remarks(records.runs, records.links)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
