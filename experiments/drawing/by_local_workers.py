"""Iterations by how many workers share a host and its link, beside their bound."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence

from matplotlib.figure import Figure

from experiments.drawing import bars, curves
from experiments.models import load
from p3kv.report.forecast import bound

HOSTS = 2
RATIO = 4.0
"""M/C where each host has one worker: the wire decides."""
DILATION = {"resnet50": 1.5, "vgg19": 0.6}
"""How much longer than in `experiments.models` workers compute, so that two cores carry them."""
_SYSTEMS = {
    "dist_sync": ("MXNet dist_sync", "dist_sync"),
    "p3kv_each": ("p3kv, each for itself", "slicing"),
    "p3kv": ("p3kv", "p3kv"),
}


class Case(NamedTuple):
    """A system, a model, and how many workers each host has."""

    system: str
    model: str
    per_host: int


def rate_mbit_s(model: str) -> float:
    """The rate of links at which M is RATIO times C with one worker on each host."""
    of = load(model)
    compute_s = of.compute_s * DILATION[model]
    return round(bound.link_for_ratio_bit_s(RATIO, compute_s, of.size_bytes, HOSTS) / 1e6, 1)


def bound_s(model: str) -> float:
    """The least time of an iteration that brings each byte to each host once."""
    of, dilation = load(model), DILATION[model]
    return bound.lower_bound_s(
        of.layer_bytes,
        [dilation * seconds for seconds in of.forward_s],
        [dilation * seconds for seconds in of.backward_s],
        HOSTS,
        rate_mbit_s(model) * 1e6,
    )


def summarize(runs: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each case: seconds, bytes on a host's link by those of the model, and CPU."""
    rows = []
    for case in dict.fromkeys(Case(*(one[name] for name in Case._fields)) for one in runs):
        of = curves.select(runs, **case._asdict())
        rows.append(
            {
                **case._asdict(),
                "iteration_s": curves.iteration_s(of)._asdict(),
                "bound_s": round(bound_s(case.model), 4),
                "sent_share": curves.Spread.of([run["sent_share"] for run in of]).median,
                "cpu_s": curves.Spread.of([run["cpu_s"] for run in of]).median,
            }
        )
    return rows


def table_text(table: Sequence[Dict[str, Any]]) -> str:
    """`summarize`'s table as text."""
    return "\n".join(
        f"{row['model']:<9} {row['per_host']} on a host {_SYSTEMS[row['system']][0]:<22} "
        f"{row['iteration_s']['median']:6.3f} s ({row['iteration_s']['low']:.3f} to "
        f"{row['iteration_s']['high']:.3f}), bound {row['bound_s']:.3f} s, sends "
        f"{row['sent_share']:.2f} of the model, {row['cpu_s']:.1f} CPU s in all"
        for row in table
    )


def draw(table: Sequence[Dict[str, Any]]) -> Figure:
    """Bars by the number of workers for each model, and the bound as lines."""
    return bars.draw(
        table,
        _SYSTEMS,
        lambda row: row["per_host"],
        str,
        f"workers on each of {HOSTS} hosts",
        rate_mbit_s,
    )
