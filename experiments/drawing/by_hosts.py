"""Throughput by the number of hosts: measured, simulated, and what a machine is too small for.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from tqdm import tqdm

from experiments.campaign.campaign import Point
from experiments.campaign.records import Records
from experiments.campaign.simulated import Simulated
from experiments.drawing import curves
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from p3kv.report.forecast import bound
from p3kv.report.forecast.simulator import BASELINE, EQUAL_PARTS, P3KV, Policy

STATED_HOSTS = 4
"""What dilation and M/C are stated for."""

PAPER_SPEED_UPS = {"vgg19": 0.61, "sockeye": 0.18}
"""What P3 section 5.4 reports for eight hosts; ResNet-50's is none."""


class Line(NamedTuple):
    """A policy that is simulated, and how its line looks."""

    policy: Policy
    title: str
    colour: str


SIMULATED = {
    "dist_sync_apart": Line(
        BASELINE, SYSTEMS["dist_sync_apart"].title, curves.LOOKS["dist_sync_apart"].colour
    ),
    "p3kv": Line(P3KV, "p3kv's order, slices of 50,000", curves.LOOKS["p3kv"].colour),
    "equal_parts": Line(EQUAL_PARTS, "equal parts on all servers", "#E69F00"),
}
"""What is simulated, by the system that it stands for or a name of its own."""


class Setup(NamedTuple):
    """What one column of a figure is of; dilation and M/C are those of four hosts."""

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


def why_failed(runs: Iterable[Mapping[str, Any]], setup: Setup, hosts: int) -> Optional[str]:
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
    return sorted(columns, key=lambda setup: (curves.paper_order(setup.model), setup))


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
        stops = ((hosts, why_failed(of, setup, hosts)) for hosts in every)
        sizes = [
            _summarize_size([run for run in of if run["hosts"] == hosts], setup, hosts)
            for hosts in every
        ]
        for size in tqdm(sizes, desc=f"simulating {setup.model}", unit="size", leave=False):
            if size["hosts"] in simulated_hosts:
                for system, line in SIMULATED.items():
                    seconds = simulated.iteration_s(
                        setup.model, line.policy, size["hosts"], setup.link_bit_s
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
            lines += too_small_for(row)
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
        lines += too_small_for(row) or ["this machine carried all measured sizes"]
    return "\n".join(lines)


def too_small_for(row: Mapping[str, Any]) -> List[str]:
    """What this machine is too small for, in words."""
    said = []
    limited = [size for size in row["sizes"] if _limited(size)]
    if limited:
        hosts = ", ".join(str(size["hosts"]) for size in limited)
        of = [size["unlimited_efficiency"] for size in limited]
        least = {
            system: min(one[system] for one in of if system in one)
            for system in curves.LOOKS
            if any(system in one for one in of)
        }
        values = ", ".join(f"{system} {value:.3f}" for system, value in least.items())
        said.append(
            f"limited by this machine with {hosts} hosts: efficiency without a limit at least "
            f"{values}"
        )
    stops = row["stops"]
    if stops is not None:
        said.append(f"{stops['hosts']} hosts do not run on this machine: {stops['why']}")
    return said


def _limited(size: Mapping[str, Any]) -> bool:
    return bool(size["measured"]) and curves.limited(size["unlimited_efficiency"])
