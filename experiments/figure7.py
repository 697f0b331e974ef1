"""Figure 7 of P3: throughput against bandwidth, four models, all systems, and the bounds.

python -m experiments.figure7
"""

from __future__ import annotations

import argparse
import string
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from experiments.campaign import options
from experiments.campaign.campaign import UNLIMITED_SYSTEMS, Point, expected_s, point
from experiments.campaign.records import Records
from experiments.drawing import curves, output
from experiments.drawing.curves import Spread
from experiments.emulation.systems import SYSTEMS
from experiments.models import MODELS, load
from experiments.simulation import bound

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
COMPARED_REPETITIONS = 3
"""How often each system runs where M is C, unless told: that is where priorities gain most."""

PAPER_GAINS = {"resnet50": 0.26, "inception_v3": 0.18, "vgg19": 0.66, "sockeye": 0.38}
"""What P3 section 5.2 reports as the greatest speed-up over its baseline."""

OVER = ("dist_sync_apart", "dist_sync", "mxnet_p3", "slicing")
"""The systems that p3kv is compared with; the first is the paper's baseline."""

PEERS = ("dist_sync_apart", "dist_sync", "mxnet_p3")
"""MXNet's own stores."""

_SAME_RATIO = 0.01  # rates are rounded
_QUICK_SYSTEMS = ("dist_sync", "mxnet_p3", "p3kv")
_ABOUT = {
    "figure": "P3 figure 7: throughput against bandwidth",
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


def points(chosen: argparse.Namespace) -> List[Point]:
    """Returns what is to be measured; the unlimited points come first."""
    made = []
    for model in chosen.models:
        dilation = chosen.dilation[model]
        for ratio in (None, *chosen.ratios):
            systems = UNLIMITED_SYSTEMS if ratio is None else chosen.systems
            made.append(point(model, chosen.hosts, ratio, dilation, systems, chosen.iterations))
    return made


def setups(runs: Iterable[Mapping[str, Any]]) -> List[Setup]:
    """Returns the panels that there are runs for, models in the paper's order."""
    found = {Setup(*(run[field] for field in Setup._fields)) for run in runs}
    return sorted(found, key=lambda s: (_place(s.model), s))


def ratio_of(setup: Setup, rate_mbit_s: float) -> float:
    """M/C at a link's rate."""
    model = load(setup.model)
    wire_s = bound.wire_time_s(model.size_bytes, setup.hosts, rate_mbit_s * 1e6)
    return wire_s / (model.compute_s * setup.dilation)


def bounds_s(setup: Setup, rate_mbit_s: float) -> Dict[str, float]:
    """Iteration times at a link's rate: of the best schedule, and of ideal first in, first out."""
    model = load(setup.model)
    arguments = (
        model.layer_bytes,
        [seconds * setup.dilation for seconds in model.forward_s],
        [seconds * setup.dilation for seconds in model.backward_s],
        setup.hosts,
        rate_mbit_s * 1e6,
    )
    return {"best": bound.lower_bound_s(*arguments), "fifo": bound.ideal_fifo_s(*arguments)}


def measured(runs: Iterable[Mapping[str, Any]], setup: Setup) -> Dict[str, Dict[float, Spread]]:
    """Returns iteration times by system and rate; without the unlimited runs."""
    found: Dict[str, Dict[float, Spread]] = {}
    mine = curves.select(runs, **setup._asdict())
    for system in curves.LOOKS:
        of = [run for run in mine if run["system"] == system and run["rate_mbit_s"] is not None]
        for rate in sorted({run["rate_mbit_s"] for run in of}):
            at_rate = [run for run in of if run["rate_mbit_s"] == rate]
            found.setdefault(system, {})[rate] = curves.iteration_s(at_rate)
    return found


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Returns for each setup p3kv's greatest speed-ups, and its distance from the bound.

    A speed-up of 0.26 is 26 % more throughput. `low` and `high` compare the extremes: the other
    system's fastest repetition with p3kv's slowest, and the other way round.
    """
    table = []
    for setup in setups(runs):
        times = measured(runs, setup)
        ours = times.get("p3kv", {})
        unlimited = curves.unlimited(runs, **setup._asdict())
        table.append(
            {
                **setup._asdict(),
                "paper_speed_up": PAPER_GAINS.get(setup.model),
                "speed_ups": {
                    system: _greatest(setup, times[system], ours)
                    for system in OVER
                    if set(times.get(system, {})) & set(ours)
                },
                "by_rate": [
                    {
                        "rate_mbit_s": rate,
                        "ratio": round(ratio_of(setup, rate), 3),
                        "over_bound": round(seconds.median / bounds_s(setup, rate)["best"] - 1, 4),
                        "over_best_peer": _over_best_peer(times, rate),
                    }
                    for rate, seconds in sorted(ours.items(), reverse=True)
                ],
                "unlimited_efficiency": unlimited,
                "limited_by_this_machine": curves.limited(unlimited),
            }
        )
    return table


def _over_best_peer(times: Mapping[str, Mapping[float, Spread]], rate: float) -> Optional[float]:
    """How much more throughput p3kv has than the best of MXNet's own stores at a rate."""
    theirs = [times[peer][rate].median for peer in PEERS if rate in times.get(peer, {})]
    return round(min(theirs) / times["p3kv"][rate].median - 1, 4) if theirs else None


def _greatest(
    setup: Setup, theirs: Mapping[float, Spread], ours: Mapping[float, Spread]
) -> Dict[str, float]:
    """The speed-up where it is greatest."""
    rate = max(set(theirs) & set(ours), key=lambda rate: theirs[rate].median / ours[rate].median)
    return {
        "speed_up": round(theirs[rate].median / ours[rate].median - 1, 4),
        "low": round(theirs[rate].low / ours[rate].high - 1, 4),
        "high": round(theirs[rate].high / ours[rate].low - 1, 4),
        "rate_mbit_s": rate,
        "ratio": round(ratio_of(setup, rate), 3),
    }


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns `summarize`'s table to be read: speed-ups beside the paper's, then the bound."""
    lines = ["", "Speed-up of p3kv over other systems, where it is greatest"]
    lines.append(f"{'':14}{'paper':>8}" + "".join(f"{system:>24}" for system in OVER))
    for row in table:
        paper = row["paper_speed_up"]
        cells = [f"{row['model']:14}", "       -" if paper is None else f"{paper:>8.0%}"]
        for system in OVER:
            gain = row["speed_ups"].get(system)
            cells.append(
                f"{'-':>24}"
                if gain is None
                else f"{gain['speed_up']:>+8.0%} at M/C = {gain['ratio']:<5.2g}"
            )
        lines.append(
            "".join(cells) + "  (limited by this machine)" * row["limited_by_this_machine"]
        )
    lines += ["The paper's are P3 over its baseline, here dist_sync_apart.", ""]
    lines.append(
        "By M/C: iterations of p3kv longer than the bound, and its throughput over that of"
    )
    lines.append("the best of MXNet's own stores")
    for row in table:
        for what, field in (("bound", "over_bound"), ("best peer", "over_best_peer")):
            cells = "".join(
                f"{at['ratio']:>8.2g}: {at[field]:>+6.1%}"
                for at in row["by_rate"]
                if at[field] is not None
            )
            lines.append(f"{row['model']:14}{what:9}{cells or '  not measured'}")
        lines.append(
            " " * 16 + curves.unlimited_text(row["unlimited_efficiency"]).replace("\n", " ")
        )
    return "\n".join(lines)


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
        f"({letter}) {curves.TITLES[setup.model]}, {setup.hosts} hosts, C = {compute_s:.3g} s"
        f" (dilation {setup.dilation:g})",
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
    fine = np.geomspace(*_shown(rates), 200)
    bounds = [bounds_s(setup, rate) for rate in fine]
    for name, line, label in (
        ("best", "-", "bound: no schedule is faster"),
        ("fifo", ":", "ideal first in, first out"),
    ):
        axis.plot(
            fine, [samples / at[name] for at in bounds], line, color=output.COLOURS["bound"],
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


def _place(model: str) -> int:
    return MODELS.index(model) if model in MODELS else len(MODELS)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(
        __doc__.splitlines()[0], MODELS, f"1, where M is C {COMPARED_REPETITIONS}, quick: 1"
    )
    parser.add_argument(
        "--ratios", nargs="+", type=float, metavar="M/C",
        help=f"rates, by M/C; default: {' '.join(f'{r:g}' for r in RATIOS)}, quick: 1",
    )  # fmt: skip
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    chosen = options.parse(parser, argv, MODELS)
    chosen.ratios = chosen.ratios or ([1.0] if chosen.quick else RATIOS)
    chosen.systems = chosen.systems or (_QUICK_SYSTEMS if chosen.quick else tuple(SYSTEMS))
    records = Records(options.numbers_path(chosen, "figure7"), _ABOUT)
    if not chosen.draw:
        todo = points(chosen)
        compared = [at for at in todo if abs(at.wire_s / at.compute_s - 1) < _SAME_RATIO]
        often = chosen.repetitions or 1
        more_often = chosen.repetitions or (1 if chosen.quick else COMPARED_REPETITIONS)
        seconds = expected_s(todo, often, chosen.warm_up)
        seconds += expected_s(compared, more_often - often, chosen.warm_up)
        told = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
        print(f"all runs together, from the first on, take about {told}")
        with options.measuring(records, chosen) as campaign:
            campaign.measure(todo, often, chosen.retry)
            campaign.measure(compared, more_often, chosen.retry)
    if not curves.select(records.runs):
        raise SystemExit(f"there is nothing to draw in {records.path}")
    records.summary = summarize(records.runs)
    print(table_text(records.summary))
    curves.finish(records, draw(records))


if __name__ == "__main__":
    main()
