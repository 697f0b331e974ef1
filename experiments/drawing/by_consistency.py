"""Efficiency by consistency rule, in cases where exact synchrony costs much.

Runs are records as `experiments.campaign` keeps them.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.drawing import curves, output
from experiments.drawing.curves import Spread
from experiments.emulation.emulator import factors
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from p3kv.report.forecast import bound


class Case(NamedTuple):
    """A model on a network, and how many iterations of which systems tell."""

    title: str
    model: str
    ratio: float
    """M/C."""
    dilation: float
    iterations: Mapping[str, int]
    hosts: int = 4


CASES = {
    "sockeye": Case("Sockeye,\nM/C = 1", "sockeye", 1.0, 4.5, {"p3kv": 4, "delayed_1": 8}),
    "stragglers": Case(
        "ResNet-50, M/C = 0.5,\na fifth of steps takes\ntwice as long",
        "resnet50", 0.5, 1.5,
        {"straggling": 30, "straggling_bounded_3": 30, "straggling_delayed_3": 30},
    ),
    "slow_links": Case(
        "ResNet-50,\nM/C = 40", "resnet50", 40.0, 1.0, {"p3kv": 2, "local_50": 150}
    ),
}  # fmt: skip
_COLOURS = {
    "bulk_synchronous": output.COLOURS["p3"],
    "delayed": "#009E73",
    "bounded": "#CC79A7",
    "local": "#56B4E9",
}


_WIDTH = 0.25
"""A bar's."""


def _rule(system: str) -> str:
    chosen = SYSTEMS[system].environment.get("P3KV_CONSISTENCY", "bulk_synchronous")
    return chosen.partition(":")[0]


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each case and system: C by the mean time of an iteration, and the most that the
    rule could reach. Where there are stragglers, `gain` is over the first system."""
    rows = []
    for name, case in CASES.items():
        first: Optional[float] = None
        for system in case.iterations:
            of = [
                run
                for run in curves.select(runs, model=case.model, system=system)
                if run["rate_mbit_s"] is not None and run["dilation"] == case.dilation
            ]
            if not of:
                continue
            found = Spread.of(
                [run["compute_s"] * len(run["iteration_s"]) / run["total_s"] for run in of]
            )
            first = first or found.median
            rows.append(
                {
                    "case": name,
                    "system": system,
                    "efficiency": {
                        part: round(value, 4) for part, value in found._asdict().items()
                    },
                    "iterations": [len(run["iteration_s"]) for run in of],
                    "bound": round(best(case, system, of[0]), 4),
                    "gain": round(found.median / first, 3),
                }
            )
    return rows


def best(case: Case, system: str, run: Mapping[str, Any]) -> float:
    """The most that a rule can reach: C by the mean time of an iteration."""
    model, rule = load(case.model), _rule(system)
    if rule == "local":
        return 1.0  # a step sends little
    if SYSTEMS[system].straggling:
        # The network is no limit there.
        staleness = 0 if rule == "bulk_synchronous" else 3
        count, warm_up = len(run["iteration_s"]), run["warm_up"]
        return count / steps_taken(
            case.hosts, warm_up, count, SYSTEMS[system].straggling, staleness
        )
    rate_bit_s = run["rate_mbit_s"] * 1e6
    if rule == "delayed":
        wire_s = bound.wire_time_s(model.size_bytes, case.hosts, rate_bit_s)
        return min(1.0, run["compute_s"] / wire_s)
    forward_s, backward_s = (
        [seconds * case.dilation for seconds in times]
        for times in (model.forward_s, model.backward_s)
    )
    return run["compute_s"] / bound.lower_bound_s(
        model.layer_bytes, forward_s, backward_s, case.hosts, rate_bit_s
    )


def steps_taken(hosts: int, warm_up: int, count: int, straggling: float, staleness: int) -> float:
    """For how many steps' time the slowest worker computes and waits, in `count` steps after those
    to warm up, where nobody is more than `staleness` steps ahead of the slowest."""
    drawn = [list(factors(rank, straggling, warm_up + count)) for rank in range(hosts)]
    ends: List[List[float]] = []
    """By step and worker."""
    for step in range(warm_up + count):
        begins = ends[-1] if ends else [0.0] * hosts
        awaited = step - 1 - staleness
        slowest = max(ends[awaited]) if awaited >= 0 else 0.0
        ends.append([max(begin, slowest) + its[step] for begin, its in zip(begins, drawn)])
    before = ends[warm_up - 1] if warm_up else [0.0] * hosts
    return max(end - begin for end, begin in zip(ends[-1], before))


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = ["C by the mean time of an iteration, median (least to greatest); the rule's bound"]
    for row in table:
        found = row["efficiency"]
        lines.append(
            f"{row['case']:12} {SYSTEMS[row['system']].title:32} {found['median']:.3f} "
            f"({found['low']:.3f} to {found['high']:.3f}, {len(row['iterations'])}), bound "
            f"{row['bound']:.3f}, {row['gain']:.2f} times the first"
        )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]], said: Sequence[str]) -> Figure:
    """Bars of each case's systems side by side, each with its rule's bound."""
    output.style()
    figure, axis = plt.subplots(figsize=(7.5, 4.0))
    cases = list(dict.fromkeys(row["case"] for row in table))
    labelled = set()
    for place, name in enumerate(cases):
        rows = [row for row in table if row["case"] == name]
        for at, row in enumerate(rows):
            rule, taken = _rule(row["system"]), Spread(**row["efficiency"])
            x = place + _WIDTH * (at - (len(rows) - 1) / 2)
            axis.bar(
                x, taken.median, _WIDTH * 0.92, color=_COLOURS[rule],
                label=None if rule in labelled else rule,
                yerr=[[taken.median - taken.low], [taken.high - taken.median]],
            )  # fmt: skip
            axis.hlines(
                row["bound"], x - _WIDTH / 2, x + _WIDTH / 2, "black",
                label=None if labelled else "the most that the rule can reach",
            )  # fmt: skip
            axis.annotate(
                f"{taken.median:.3f}", (x, max(taken.median, row["bound"])), fontsize=7,
                ha="center", textcoords="offset points", xytext=(0, 3),
            )  # fmt: skip
            labelled.add(rule)
    axis.set_xticks(range(len(cases)), [CASES[name].title for name in cases])
    axis.set_ylim(0, 1.3)
    axis.set_ylabel("C by the mean time of an iteration")
    axis.legend(fontsize=7, ncols=3, loc="upper left")
    curves.foot(figure, said)
    return figure
