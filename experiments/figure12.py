"""Figure 12 of P3: throughput against the size of slices, measured and simulated.

python -m experiments.figure12
"""

from __future__ import annotations

import argparse
import string
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator
from tqdm import tqdm

from experiments.campaign import options
from experiments.campaign.campaign import Point, point
from experiments.campaign.records import Records
from experiments.campaign.simulated import Simulated
from experiments.drawing import curves, output
from experiments.models import load
from experiments.simulation import bound
from experiments.simulation.policies import P3KV

FIGURE_MODELS = ("resnet50", "vgg19")
SLICE_ELEMS = (5_000, 10_000, 25_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_QUICK_SLICE_ELEMS = (10_000, 50_000, 200_000, 1_000_000)
_PAPER_ELEMS = 50_000
_SETTING = "P3KV_SLICE_SIZE"
_ABOUT = {
    "figure": "P3 figure 12: throughput against the size of slices, p3kv",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated",
}


class Setup(NamedTuple):
    """What one panel of the figure is of."""

    model: str
    hosts: int
    dilation: float
    congestion_control: str
    rate_mbit_s: float


def points(chosen: argparse.Namespace, ratio: Optional[float]) -> List[Point]:
    """Returns a point for each model and size of slices; without a ratio, without a limit."""
    return [
        point(
            model, chosen.hosts, ratio, chosen.dilation[model], ("p3kv",), chosen.iterations,
            **{_SETTING: elems},
        )
        for model in chosen.models
        for elems in chosen.slices
    ]  # fmt: skip


def setups(runs: Iterable[Mapping[str, Any]]) -> List[Setup]:
    """Returns the panels that there are runs for."""
    found = {
        Setup(*(run[field] for field in Setup._fields))
        for run in runs
        if run["rate_mbit_s"] is not None
    }
    return sorted(found)


def summarize(records: Records) -> List[Dict[str, Any]]:
    """Returns for each setup, by size of slices, throughput and what the simulator expects."""
    simulated = Simulated(records)
    table = []
    for setup in setups(records.runs):
        model = load(setup.model)
        samples = curves.samples(setup.model, setup.hosts)
        undilated_bit_s = setup.rate_mbit_s * 1e6 * setup.dilation
        bound_s = setup.dilation * bound.lower_bound_s(
            model.layer_bytes, model.forward_s, model.backward_s, setup.hosts, undilated_bit_s
        )
        free = {**setup._asdict(), "rate_mbit_s": None}
        found = curves.select(records.runs, **setup._asdict())
        sizes = []
        elems_found = sorted({int(run["settings"][_SETTING]) for run in found})
        for elems in tqdm(elems_found, desc=f"simulating {setup.model}", leave=False):
            seconds = curves.iteration_s([run for run in found if _elems(run) == elems])
            unlimited = [run for run in curves.select(records.runs, **free) if _elems(run) == elems]
            simulated_s = setup.dilation * simulated.iteration_s(
                setup.model, P3KV._replace(slice_elems=elems), setup.hosts, undilated_bit_s
            )
            sizes.append(
                {
                    "slice_elems": elems,
                    "measured": curves.throughput(seconds, samples)._asdict(),
                    "simulated": samples / simulated_s,
                    "unlimited_efficiency": curves.unlimited(unlimited).get("p3kv"),
                }
            )
        wire_s = bound.wire_time_s(model.size_bytes, setup.hosts, setup.rate_mbit_s * 1e6)
        table.append(
            {
                **setup._asdict(),
                "ratio": round(wire_s / (model.compute_s * setup.dilation), 3),
                "bound": samples / bound_s,
                "sizes": sizes,
            }
        )
    return table


def _elems(run: Mapping[str, Any]) -> int:
    return int(run["settings"][_SETTING])


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns `summarize`'s table, to be read."""
    lines = []
    for row in table:
        lines.append(f"\n{row['model']}, M/C = {row['ratio']:g}: part of the bound's throughput")
        lines.append(
            f"{'elements':>10}{'measured':>10}{'simulated':>11}{'efficiency, no limit':>22}"
        )
        for size in row["sizes"]:
            free = size["unlimited_efficiency"]
            lines.append(
                f"{size['slice_elems']:>10}{size['measured']['median'] / row['bound']:>10.3f}"
                f"{size['simulated'] / row['bound']:>11.3f}"
                + ("" if free is None else f"{free:>22.3f}")
                + ("  limited by this machine" if _limited(size) else "")
            )
    return "\n".join(lines)


def _limited(size: Mapping[str, Any]) -> bool:
    free = size["unlimited_efficiency"]
    return free is not None and free < curves.CARRIED


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
    weak = [(size["slice_elems"], size["measured"]["median"]) for size in sizes if _limited(size)]
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
        f" {row['rate_mbit_s']:.0f} Mbit/s\nM/C = {row['ratio']:.2g}, dilation"
        f" {row['dilation']:g}",
        fontsize=9,
    )


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], FIGURE_MODELS)
    parser.add_argument("--slices", nargs="+", type=int, metavar="ELEMENTS")
    parser.add_argument("--ratio", type=float, default=1.0, metavar="M/C")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    chosen.slices = chosen.slices or (_QUICK_SLICE_ELEMS if chosen.quick else SLICE_ELEMS)
    records = Records(options.numbers_path(chosen, "figure12"), _ABOUT)
    if not chosen.draw:
        with options.measuring(records, chosen) as campaign:
            # Small slices cost processor time: once without a limit shows whether it is there.
            campaign.measure(points(chosen, None), 1, chosen.retry)
            campaign.measure(points(chosen, chosen.ratio), chosen.repetitions or 1, chosen.retry)
    if not curves.select(records.runs):
        raise SystemExit(f"there is nothing to draw in {records.path}")
    records.summary = summarize(records)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary, curves.remarks(records.runs, records.links)))


if __name__ == "__main__":
    main()
