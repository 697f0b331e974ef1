"""Iterations by how many hosts have a server only, and with a slower link, beside their bounds."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence

from matplotlib.figure import Figure
from scipy.optimize import linprog

from experiments.drawing import bars, curves
from experiments.models import load
from p3kv.report.forecast import bound

WORKERS = 4
RATIO = 4.0
"""M/C of the hosts with workers alone: the wire decides."""
DILATION = {"resnet50": 1.0, "vgg19": 0.4}
"""How much longer than in `experiments.models` hosts compute, so that two cores carry them all."""
SLOW_SHARE = 0.5
_SYSTEMS = {
    "dist_sync": ("MXNet dist_sync", "dist_sync"),
    "p3kv_balanced": ("p3kv, equal parts", "slicing"),
    "p3kv": ("p3kv", "p3kv"),
}


class Case(NamedTuple):
    """A system, a model and hosts: `alone` have a server only; the last may have a slow link."""

    system: str
    model: str
    alone: int
    slow: bool


def busiest_link(workers_on: Sequence[int], rates: Sequence[float]) -> float:
    """The least time in which all links carry a model of one byte, over all placements.

    By host, how many workers it has, and its link's rate in bytes a second. A host with w of n
    workers and a part x of the model carries w (1 - x) + (n - w) x bytes in each direction. Sought
    are the parts and the time.
    """
    count, hosts = sum(workers_on), range(len(rates))
    carried = [
        [*((count - 2 * workers_on[host] if host == one else 0) for one in hosts), -rates[host]]
        for host in hosts
    ]
    found = linprog(
        [0.0] * len(rates) + [1.0],
        A_ub=carried,
        b_ub=[-here for here in workers_on],
        A_eq=[[1.0] * len(rates) + [0.0]],
        b_eq=[1.0],
    )
    assert found.success, found.message
    return float(found.fun)


def rate_mbit_s(model: str) -> float:
    """The rate of links at which M is RATIO times C on the hosts with workers alone."""
    of = load(model)
    compute_s = of.compute_s * DILATION[model]
    return round(bound.link_for_ratio_bit_s(RATIO, compute_s, of.size_bytes, WORKERS) / 1e6, 1)


def bound_s(case: Case) -> float:
    """The least time of an iteration, whatever the placement and the schedule."""
    of, dilation = load(case.model), DILATION[case.model]
    rates = [1.0] * (WORKERS + case.alone)
    rates[-1] = SLOW_SHARE if case.slow else 1.0
    carried = busiest_link([1] * WORKERS + [0] * case.alone, rates)
    # On two hosts a link carries each byte of the model once.
    return bound.lower_bound_s(
        [carried * size for size in of.layer_bytes],
        [dilation * seconds for seconds in of.forward_s],
        [dilation * seconds for seconds in of.backward_s],
        2,
        rate_mbit_s(case.model) * 1e6,
    )


def summarize(runs: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each case, with its bound, and how much longer its iterations are."""
    rows = []
    cases = {Case(*(one[name] for name in Case._fields)) for one in runs}
    for case in sorted(cases, key=lambda of: (of.model, of.slow, of.alone, of.system)):
        taken = curves.iteration_s(curves.select(runs, **case._asdict()))
        least = bound_s(case)
        rows.append(
            {
                **case._asdict(),
                "iteration_s": taken._asdict(),
                "bound_s": round(least, 4),
                "over_bound": round(taken.median / least - 1, 4),
            }
        )
    return rows


def table_text(table: Sequence[Dict[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        taken = row["iteration_s"]
        where = "one link at half the rate" if row["slow"] else f"{row['alone']} without a worker"
        title, _ = _SYSTEMS[row["system"]]
        lines.append(
            f"{row['model']:<9} {where:<26} {title:<18} {taken['median']:6.3f} s "
            f"({taken['low']:.3f} to {taken['high']:.3f}), bound {row['bound_s']:.3f} s "
            f"{row['over_bound']:+.1%}"
        )
    return "\n".join(lines)


def draw(table: Sequence[Dict[str, Any]]) -> Figure:
    """Bars by hosts for each model, and the bounds as lines."""
    return bars.draw(
        table,
        _SYSTEMS,
        lambda row: (row["alone"], row["slow"]),
        lambda place: "half a link" if place[1] else f"+{place[0]}",
        "hosts with a server only, beside four with a worker and a server",
        rate_mbit_s,
    )
