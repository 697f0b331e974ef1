"""Figures 8 and 9 of P3: traffic in and out of one host, of the baseline and of p3kv.

The counters of the first host's interface are read every 10 ms during the measured iterations.

python -m experiments.figure8_9
"""

from __future__ import annotations

import argparse
import statistics
import string
from typing import Any, Dict, List, Mapping, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments import bound, curves, machine, options, output, traffic
from experiments.campaign import DILATION
from experiments.job import RunFailed
from experiments.measure import measure
from experiments.models import load
from experiments.records import Records
from experiments.traffic import IDLE_SHARE, PERIOD_S, Sampler
from scripts.cluster import Cluster, ClusterError, missing_requirements

MODELS = ("resnet50", "vgg19", "sockeye")
PANELS = (("dist_sync_apart", "baseline"), ("p3kv", "p3kv"))
"""From top to bottom: the system and what it is called; the paper's figure 8, then its figure 9."""

_SHOWN_ITERATIONS = 2.5
_ABOUT = {
    "figure": "P3 figures 8 and 9: traffic of one host",
    "computation": curves.EMULATED,
    "units": "inbound_mbit_s, outbound_mbit_s: means of consecutive periods of "
    f"{PERIOD_S * 1e3:g} ms, counted at the host's interface during the measured iterations; "
    f"idle: the part of these periods below {IDLE_SHARE:.0%} of the link's rate; used: the mean "
    "as a part of the link's rate; iteration_s: the slowest worker's; compute_s: C, dilated",
}
_IDENTITY = (
    "model", "system", "hosts", "rate_mbit_s", "dilation", "congestion_control", "warm_up",
    "iterations",
)  # fmt: skip


def planned(chosen: argparse.Namespace) -> List[Dict[str, Any]]:
    """What is to be measured: for each run what identifies it."""
    runs = []
    for name in chosen.models:
        model, dilation = load(name), chosen.dilation[name]
        link_bit_s = bound.link_for_ratio_bit_s(
            chosen.ratio, model.compute_s * dilation, model.size_bytes, chosen.hosts
        )
        for system, _ in PANELS:
            values = (
                name, system, chosen.hosts, round(link_bit_s / 1e6, 2), dilation,
                chosen.congestion_control, chosen.warm_up, chosen.iterations,
            )  # fmt: skip
            runs.append(dict(zip(_IDENTITY, values)))
    return runs


def record(run: Mapping[str, Any]) -> Dict[str, Any]:
    """Measures one run and returns all that is known of it.

    Raises ClusterError and RunFailed.
    """
    with Cluster(run["hosts"], run["rate_mbit_s"], run["congestion_control"]) as cluster:
        goodput_mbit_s = [round(link.mbit_s, 2) for link in cluster.goodput()]
        sampler = Sampler(lambda: cluster.interface_counters(cluster.hosts[0]))
        result = measure(
            cluster,
            run["system"],
            run["model"],
            dilation=run["dilation"],
            warm_up=run["warm_up"],
            iterations=run["iterations"],
            timeout_s=900.0,
            during=sampler,
        )
    samples = sampler.samples()
    found = traffic.binned(samples)
    directions = (("in", found.inbound_mbit_s), ("out", found.outbound_mbit_s))
    rate_mbit_s = run["rate_mbit_s"]
    return {
        **run,
        "compute_s": result.compute_s,
        "iteration_s": [round(seconds, 6) for seconds in result.iteration_s],
        "cpu_s": round(result.cpu_s, 2),
        "goodput_mbit_s": goodput_mbit_s,
        "late_samples": round(traffic.late_share(samples), 4),
        "idle": {
            way: round(traffic.idle_fraction(rates, rate_mbit_s), 4) for way, rates in directions
        },
        "used": {way: round(statistics.mean(rates) / rate_mbit_s, 4) for way, rates in directions},
        **found._asdict(),
    }


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


def draw(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws a column for each model, the baseline above p3kv."""
    output.style()
    models = list(dict.fromkeys(run["model"] for run in runs))
    figure, axes = plt.subplots(
        len(PANELS), len(models), figsize=(max(4.6 * len(models), 6.4), 5.8), squeeze=False
    )
    for place, name in enumerate(models):
        of = {run["system"]: run for run in runs if run["model"] == name}
        median_s = max(statistics.median(run["iteration_s"]) for run in of.values())
        longest_s = max(len(run["inbound_mbit_s"]) for run in of.values()) * PERIOD_S
        for axis, (system, called), number in zip(axes[:, place], PANELS, "89"):
            if system not in of:
                axis.remove()
                continue
            _draw_run(axis, of[system], min(_SHOWN_ITERATIONS * median_s, longest_s))
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
    curves.foot(figure, [])
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
    chosen = _parse(argv)
    records = Records(options.numbers_path(chosen, "figure8_9"), _ABOUT)
    wanted = planned(chosen)
    if not chosen.draw:
        _measure([run for run in wanted if _find(records, run) is None], records, chosen)
    runs = [run for run in (_find(records, one) for one in wanted) if run is not None]
    if not runs:
        raise SystemExit(f"there is nothing to draw in {records.path}")
    records.summary = [
        {name: run[name] for name in (*_IDENTITY, "idle", "used", "late_samples")} for run in runs
    ]
    print(report(runs))
    curves.finish(records, draw(runs))


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = output.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few minutes, into files of their own name"
    )
    parser.add_argument(
        "--models", nargs="+", choices=DILATION, metavar="MODEL",
        help=f"of {', '.join(DILATION)}; default: {' '.join(MODELS)}, quick: resnet50",
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--ratio", type=float, default=1.0, metavar="M/C",
        help="wire time by computation, which decides the link's rate; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, metavar="N", help="default: 4, quick: 2")
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--dilation", type=float, metavar="D",
        help="stretch computation, and divide the bandwidth, by D; default: "
        + ", ".join(f"{name} {DILATION[name]:g}" for name in MODELS),
    )  # fmt: skip
    parser.add_argument("--congestion-control", default="cubic", metavar="NAME")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what is there")
    chosen = parser.parse_args(argv)
    chosen.models = chosen.models or (["resnet50"] if chosen.quick else list(MODELS))
    chosen.iterations = chosen.iterations or (2 if chosen.quick else 4)
    chosen.dilation = {name: chosen.dilation or DILATION[name] for name in DILATION}
    return chosen


def _measure(
    todo: Sequence[Mapping[str, Any]], records: Records, chosen: argparse.Namespace
) -> None:
    """Measures what is left, one run after the other; each is kept at once."""
    if not todo:
        return
    problem = missing_requirements()
    if problem is not None:
        raise SystemExit(problem)
    place = records.begin(machine.describe(chosen.congestion_control))
    with tqdm(todo, unit="run") as bar:
        for run in bar:
            bar.set_description(f"{run['model']}, {run['system']}")
            try:
                records.add_run({**record(run), "machine": place})
            except (ClusterError, RunFailed) as error:
                raise SystemExit(f"{error}\nThe same command goes on from here.") from error


def _find(records: Records, wanted: Mapping[str, Any]) -> Optional[Mapping[str, Any]]:
    """The latest run that is what `wanted` says."""
    return next(iter(curves.select(reversed(records.runs), **wanted)), None)


if __name__ == "__main__":
    main()
