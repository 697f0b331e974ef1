"""Figures 8 and 9 of P3: traffic in and out of one host, of the baseline and of p3kv.

The counters of the first host's interface are read every 10 ms during the measured iterations.

python -m experiments.figure8_9
"""

from __future__ import annotations

import argparse
import statistics
import string
from typing import Any, List, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.campaign import options
from experiments.campaign.campaign import Point, point
from experiments.campaign.records import Records
from experiments.campaign.traffic import IDLE_SHARE, PERIOD_S
from experiments.drawing import curves, output

FIGURE_MODELS = ("resnet50", "vgg19", "sockeye")
PANELS = (("dist_sync_apart", "baseline"), ("p3kv", "p3kv"))
"""From top to bottom: the system and what it is called; the paper's figure 8, then its figure 9."""

_SHOWN_ITERATIONS = 2.5
_SUMMARY = (
    "model", "system", "hosts", "rate_mbit_s", "dilation", "congestion_control", "repetition",
    "idle", "used", "late_samples",
)  # fmt: skip
_ABOUT = {
    "figure": "P3 figures 8 and 9: traffic of one host",
    "computation": curves.EMULATED,
    "units": "inbound_mbit_s, outbound_mbit_s: means of consecutive periods of "
    f"{PERIOD_S * 1e3:g} ms, counted at the host's interface during the measured iterations; "
    f"idle: the part of these periods below {IDLE_SHARE:.0%} of the link's rate; used: the mean "
    "as a part of the link's rate; late_samples: the part of the readings that came too late; "
    "iteration_s: the slowest worker's; compute_s: C, dilated",
}


def points(chosen: argparse.Namespace) -> List[Point]:
    """Returns a point for each model."""
    systems = tuple(system for system, _ in PANELS)
    return [
        point(
            model, chosen.hosts, chosen.ratio, chosen.dilation[model], systems, chosen.iterations
        )
        for model in chosen.models
    ]  # fmt: skip


def shown(records: Records, chosen: argparse.Namespace) -> List[Mapping[str, Any]]:
    """Returns the last run of each panel that there is one for."""
    found = []
    for at in points(chosen):
        for system in at.systems:
            found += curves.select(
                records.runs,
                model=at.model,
                system=system,
                hosts=at.hosts,
                rate_mbit_s=at.rate_mbit_s,
                dilation=at.dilation,
                congestion_control=chosen.congestion_control,
            )[-1:]
    return found


def report(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the idle fractions and iteration times as a table."""
    lines = [
        "",
        f"{'':14}{'':18}{'idle in':>8}{'idle out':>9}{'used in':>8}{'used out':>9}"
        f"{'iteration':>11}{'C':>9}",
    ]
    for run in runs:
        idle, used = run["idle"], run["used"]
        lines.append(
            f"{run['model']:14}{run['system']:18}{idle['in']:>8.1%}{idle['out']:>9.1%}"
            f"{used['in']:>8.1%}{used['out']:>9.1%}{statistics.median(run['iteration_s']):>9.3f} s"
            f"{run['compute_s']:>7.2f} s"
        )
    return "\n".join(lines)


def draw(runs: Sequence[Mapping[str, Any]], said: Sequence[str] = ()) -> Figure:
    """Draws a column for each model, the baseline above p3kv."""
    output.style()
    models = list(dict.fromkeys(run["model"] for run in runs))
    figure, axes = plt.subplots(
        len(PANELS), len(models), figsize=(max(4.6 * len(models), 6.4), 5.8), squeeze=False
    )
    for place, name in enumerate(models):
        of = {run["system"]: run for run in runs if run["model"] == name}
        median_s = max(statistics.median(run["iteration_s"]) for run in of.values())
        shortest_s = min(len(run["inbound_mbit_s"]) for run in of.values()) * PERIOD_S
        for axis, (system, called), number in zip(axes[:, place], PANELS, "89"):
            if system not in of:
                axis.remove()
                continue
            _draw_run(axis, of[system], min(_SHOWN_ITERATIONS * median_s, shortest_s))
            idle, used = of[system]["idle"], of[system]["used"]
            axis.set_title(
                f"{number} ({string.ascii_lowercase[place]}) {curves.TITLES[name]}, {called}\n"
                f"idle {idle['in']:.0%} in, {idle['out']:.0%} out;"
                f" {used['in']:.0%} in, {used['out']:.0%} out of the link used",
                fontsize=9,
            )
        run = next(iter(of.values()))
        axes[-1, place].set_xlabel(
            f"time (seconds); {run['hosts']} hosts, {run['rate_mbit_s']:.0f} Mbit/s,"
            f" C = {run['compute_s']:.3g} s"
        )
    for row in axes:
        row[0].set_ylabel("out  |  in  (Mbit/s)")
    curves.foot(figure, said)
    return figure


def _draw_run(axis: Axes, run: Mapping[str, Any], shown_s: float) -> None:
    colour = curves.LOOKS[run["system"]].colour
    rate_mbit_s = run["rate_mbit_s"]
    for rates, sign, alpha in ((run["inbound_mbit_s"], 1, 1.0), (run["outbound_mbit_s"], -1, 0.55)):
        shown = rates[: round(shown_s / PERIOD_S)]
        axis.stairs(
            [sign * rate for rate in shown],
            [index * PERIOD_S for index in range(len(shown) + 1)],
            fill=True, color=colour, alpha=alpha, linewidth=0,
        )  # fmt: skip
        axis.axhline(
            sign * rate_mbit_s, color=output.COLOURS["bound"], linewidth=0.7, linestyle=":"
        )
    axis.axhline(0, color=output.COLOURS["bound"], linewidth=0.5)
    axis.set_xlim(0, shown_s)
    axis.set_ylim(-1.35 * rate_mbit_s, 1.35 * rate_mbit_s)
    axis.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.parser(__doc__.splitlines()[0], FIGURE_MODELS)
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--ratio", type=float, default=1.0, metavar="M/C",
        help="wire time by computation, which decides the link's rate; default: %(default)s",
    )  # fmt: skip
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    records = Records(options.numbers_path(chosen, "figure8_9"), _ABOUT)
    if not chosen.draw:
        with options.measuring(records, chosen, traffic=True) as campaign:
            campaign.measure(points(chosen), chosen.repetitions or 1, chosen.retry)
    runs = shown(records, chosen)
    if not runs:
        raise SystemExit(f"there is nothing to draw in {records.path}")
    records.summary = [{name: run[name] for name in _SUMMARY} for run in runs]
    print(report(runs))
    curves.finish(records, draw(runs, curves.remarks(records.runs, records.links)))


if __name__ == "__main__":
    main()
