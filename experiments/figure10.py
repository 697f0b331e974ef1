"""Figure 10 of P3: throughput of clusters of different sizes, measured and simulated.

python -m experiments.figure10
"""

from __future__ import annotations

import argparse
import string
import textwrap
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from tqdm import tqdm

from experiments.campaign import options
from experiments.campaign.campaign import DILATION, UNLIMITED_SYSTEMS, Campaign, Point
from experiments.campaign.records import Records
from experiments.campaign.simulated import Simulated
from experiments.drawing import curves, output
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from experiments.simulation import bound
from experiments.simulation.policies import BASELINE, P3KV

FIGURE_MODELS = ("resnet50", "vgg19", "sockeye")
HOSTS = (2, 4, 8, 16)
STATED_HOSTS = 4
"""What dilation and M/C are stated for."""

PAPER_SPEED_UPS = {"vgg19": 0.61, "sockeye": 0.18}
"""What P3 section 5.4 reports for eight hosts; ResNet-50's is none."""

_DILATION = {**DILATION, "resnet50": 3.0}
"""Two cores carry 16 hosts with a limit, too: at ResNet-50's usual dilation they are 95 % busy."""

_SYSTEMS = ("dist_sync_apart", "dist_sync", "p3kv")
_SIMULATED_HOSTS = (2, 4, 8, 16, 32, 64, 128, 256)
_SIMULATED = {"dist_sync_apart": BASELINE, "p3kv": P3KV}
_ABOUT = {
    "figure": "P3 figure 10: throughput against the number of hosts",
    "computation": curves.EMULATED,
    "units": "rate_mbit_s: each link, each direction, Ethernet frames; iteration_s: the slowest "
    "worker's, one value for each measured iteration; compute_s: C, dilated. Dilation grows with "
    "the hosts, because one machine carries them all: the summary's samples/s have it undone",
}


class Setup(NamedTuple):
    """What one column of the figure is of; dilation and M/C are those of four hosts."""

    model: str
    dilation: float
    congestion_control: str
    ratio: float

    @property
    def link_bit_s(self) -> float:
        """The undilated rate of every link, at any number of hosts."""
        model = load(self.model)
        return bound.link_for_ratio_bit_s(
            self.ratio, model.compute_s, model.size_bytes, STATED_HOSTS
        )

    def point(self, hosts: int, limit: bool, systems: Sequence[str], iterations: int) -> Point:
        """What is measured with `hosts` hosts, with or without a limit on the links."""
        dilation = round(self.dilation * hosts / STATED_HOSTS, 6)
        rate_mbit_s = round(self.link_bit_s / dilation / 1e6, 2) if limit else None
        return Point(self.model, hosts, rate_mbit_s, dilation, tuple(systems), iterations)


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
            why = _why_failed(records.runs, setup, hosts)
            if why is not None:
                print(f"{model}: {hosts} hosts do not run on this machine: {why}")
                break
            points.append(setup.point(hosts, True, chosen.systems, chosen.iterations))
    campaign.measure(points, chosen.repetitions or 1, chosen.retry)


def _why_failed(runs: Iterable[Mapping[str, Any]], setup: Setup, hosts: int) -> Optional[str]:
    """Why a run without a limit has failed; None when none has."""
    for run in runs:
        free = run["hosts"] == hosts and run["rate_mbit_s"] is None and _belongs(run, setup)
        if free and "iteration_s" not in run:
            return curves.last_line(run["failures"][-1])
    return None


def setups(runs: Iterable[Mapping[str, Any]], ratio: float) -> List[Setup]:
    """Returns the columns that there are runs for, models in the paper's order.

    `ratio` is that of a model of which there are unlimited runs only.
    """
    found: Dict[Tuple[str, float, str], Set[float]] = {}
    for run in runs:
        dilation = round(run["dilation"] * STATED_HOSTS / run["hosts"], 6)
        of = found.setdefault((run["model"], dilation, run["congestion_control"]), set())
        if run["rate_mbit_s"] is not None:
            model = load(run["model"])
            bit_s = run["rate_mbit_s"] * 1e6 * run["dilation"]
            wire_s = bound.wire_time_s(model.size_bytes, STATED_HOSTS, bit_s)
            of.add(round(wire_s / model.compute_s, 2))
    columns = [Setup(*key, each) for key, of in found.items() for each in of or {ratio}]
    order = [*FIGURE_MODELS, *sorted({setup.model for setup in columns} - set(FIGURE_MODELS))]
    return sorted(columns, key=lambda setup: (order.index(setup.model), setup))


def _belongs(run: Mapping[str, Any], setup: Setup) -> bool:
    at = setup.point(run["hosts"], run["rate_mbit_s"] is not None, (), 0)
    return (
        run["model"] == at.model
        and run["dilation"] == at.dilation
        and run["rate_mbit_s"] == at.rate_mbit_s
        and run["congestion_control"] == setup.congestion_control
    )


def summarize(
    records: Records, simulated_hosts: Sequence[int], ratio: float = 1.0
) -> List[Dict[str, Any]]:
    """Returns for each setup what is known of each number of hosts, in undilated samples/s.

    Simulates what the records lack; `ratio` as for `setups`.
    """
    simulated = Simulated(records)
    table = []
    for setup in setups(records.runs, ratio):
        of = [run for run in records.runs if _belongs(run, setup)]
        every = sorted({run["hosts"] for run in of} | set(simulated_hosts))
        stops = ((hosts, _why_failed(of, setup, hosts)) for hosts in every)
        sizes = [
            _summarize_size([run for run in of if run["hosts"] == hosts], setup, hosts)
            for hosts in every
        ]
        for size in tqdm(sizes, desc=f"simulating {setup.model}", unit="size", leave=False):
            if size["hosts"] in simulated_hosts:
                for system, policy in _SIMULATED.items():
                    seconds = simulated.iteration_s(
                        setup.model, policy, size["hosts"], setup.link_bit_s
                    )
                    samples = curves.samples(setup.model, size["hosts"])
                    size["simulated"][system] = round(samples / seconds, 3)
        table.append(
            {
                **setup._asdict(),
                "undilated_link_mbit_s": round(setup.link_bit_s / 1e6, 2),
                "paper_speed_up_of_eight_hosts": PAPER_SPEED_UPS.get(setup.model),
                "stops": next(({"hosts": n, "why": why} for n, why in stops if why), None),
                "sizes": sizes,
            }
        )
    return table


def _summarize_size(runs: Sequence[Mapping[str, Any]], setup: Setup, hosts: int) -> Dict[str, Any]:
    """What is known of one number of hosts, of which `runs` are."""
    model = load(setup.model)
    samples = curves.samples(setup.model, hosts)
    bound_s = bound.lower_bound_s(
        model.layer_bytes, model.forward_s, model.backward_s, hosts, setup.link_bit_s
    )
    undone = samples * setup.point(hosts, False, (), 0).dilation
    limited = [run for run in curves.select(runs) if run["rate_mbit_s"] is not None]
    times = {
        system: curves.iteration_s([run for run in limited if run["system"] == system])
        for system in curves.LOOKS
        if any(run["system"] == system for run in limited)
    }
    ours = times.get("p3kv")
    return {
        "hosts": hosts,
        "linear": round(samples / model.compute_s, 3),
        "bound": round(samples / bound_s, 3),
        "simulated": {},
        "measured": {
            system: curves.throughput(seconds, undone)._asdict()
            for system, seconds in times.items()
        },
        "speed_ups": {
            system: round(seconds.median / ours.median - 1, 4)
            for system, seconds in times.items()
            if ours is not None and system != "p3kv"
        },
        "unlimited_efficiency": curves.unlimited(runs),
    }


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """Returns the measured part of `summarize`'s table, to be read."""
    lines = []
    for row in table:
        lines.append(
            f"\n{row['model']}, {row['undilated_link_mbit_s']:.0f} Mbit/s before dilation: part of"
            " linear scaling, measured (simulated)"
        )
        if not any(size["measured"] for size in row["sizes"]):
            lines += _too_small_for(row)
            continue
        systems = [
            name for name in curves.LOOKS if any(name in s["measured"] for s in row["sizes"])
        ]
        lines.append(f"{'hosts':>6}{'bound':>8}" + "".join(f"{name:>24}" for name in systems))
        for size in row["sizes"]:
            if not size["measured"]:
                continue
            cells = [f"{size['hosts']:>6}{size['bound'] / size['linear']:>8.3f}"]
            for name in systems:
                at = size["measured"].get(name)
                cell = "-" if at is None else f"{at['median'] / size['linear']:.3f}"
                if name in size["simulated"]:
                    cell += f" ({size['simulated'][name] / size['linear']:.3f})"
                gain = size["speed_ups"].get(name)
                cells.append(f"{cell:>16}" + (" " * 8 if gain is None else f" [{gain:+5.0%}]"))
            lines.append("".join(cells))
        paper = row["paper_speed_up_of_eight_hosts"]
        lines.append(
            "[speed-up of p3kv]"
            + ("" if paper is None else f"; the paper's over its baseline, 8 hosts: {paper:+.0%}")
        )
        lines += _too_small_for(row) or ["this machine carried all measured sizes"]
    return "\n".join(lines)


def _too_small_for(row: Mapping[str, Any]) -> List[str]:
    """What this machine is too small for, in words."""
    said = []
    for size in filter(_limited, row["sizes"]):
        efficiencies = curves.unlimited_text(size["unlimited_efficiency"]).replace("\n", " ")
        said.append(f"{size['hosts']} hosts {efficiencies}")
    stops = row["stops"]
    if stops is not None:
        said.append(f"{stops['hosts']} hosts do not run on this machine: {stops['why']}")
    return said


def _limited(size: Mapping[str, Any]) -> bool:
    return bool(size["measured"]) and curves.limited(size["unlimited_efficiency"])


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
        dilation = row["dilation"] / STATED_HOSTS
        above.set_title(
            f"({string.ascii_lowercase[column]}) {curves.TITLES[row['model']]},"
            f" {row['undilated_link_mbit_s']:.0f} Mbit/s\nmeasured at dilation"
            f" {dilation:g} per host",
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
            0.03, 0.03, "\n".join(textwrap.fill(said, 60) for said in _too_small_for(row)),
            transform=below.transAxes, fontsize=7, color=output.COLOURS["emphasis"],
        )  # fmt: skip
    axes[0].set_ylabel("samples/s, all hosts, dilation undone")
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
    for system in _SIMULATED:
        of = [size for size in sizes if system in size["simulated"]]
        axis.plot(
            [size["hosts"] for size in of],
            [size["simulated"][system] * scale(size) for size in of],
            color=curves.LOOKS[system].colour, linewidth=1,
            label=f"{SYSTEMS[system].title}, simulated",
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
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--simulate-up-to", type=int, metavar="N", help="default: 256, quick: 64")
    chosen = options.parse(parser, argv, FIGURE_MODELS)
    chosen.hosts = chosen.hosts or ((2, 4) if chosen.quick else HOSTS)
    chosen.systems = chosen.systems or (("dist_sync", "p3kv") if chosen.quick else _SYSTEMS)
    chosen.ratio = round(chosen.ratio, 2)
    largest = chosen.simulate_up_to or (64 if chosen.quick else 256)
    records = Records(options.numbers_path(chosen, "figure10"), _ABOUT)
    if not chosen.draw:
        with options.measuring(records, chosen) as campaign:
            measure(records, campaign, chosen)
    if not curves.select(records.runs):
        raise SystemExit(f"there is nothing to draw in {records.path}")
    simulated_hosts = [hosts for hosts in _SIMULATED_HOSTS if hosts <= largest]
    records.summary = summarize(records, simulated_hosts, chosen.ratio)
    print(table_text(records.summary))
    curves.finish(records, draw(records.summary, curves.remarks(records.runs, records.links)))


if __name__ == "__main__":
    main()
