"""Iterations by how many workers share a host and its link, beside their bound."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.drawing import curves, output
from experiments.models import load
from p3kv.forecast import bound

HOSTS = 2
RATIO = 4.0
"""M/C where each host has one worker: the wire decides."""
DILATION = {"resnet50": 1.5, "vgg19": 0.6}
"""How much longer than in `experiments.models` workers compute, so that two cores carry them."""
_TITLES = {"dist_sync": "MXNet dist_sync", "p3kv_each": "p3kv, each for itself", "p3kv": "p3kv"}


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
        f"{row['model']:<9} {row['per_host']} on a host {_TITLES[row['system']]:<22} "
        f"{row['iteration_s']['median']:6.3f} s ({row['iteration_s']['low']:.3f} to "
        f"{row['iteration_s']['high']:.3f}), bound {row['bound_s']:.3f} s, sends "
        f"{row['sent_share']:.2f} of the model, {row['cpu_s']:.1f} CPU s in all"
        for row in table
    )


def draw(table: Sequence[Dict[str, Any]]) -> Figure:
    """Bars by the number of workers for each model, and the bound as a line."""
    output.style()
    models = list(dict.fromkeys(row["model"] for row in table))
    figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 3.6), squeeze=False)
    looks = {"dist_sync": "dist_sync", "p3kv_each": "slicing", "p3kv": "p3kv"}
    for axis, model in zip(axes.flat, models):
        of = [row for row in table if row["model"] == model]
        places = sorted({row["per_host"] for row in of})
        for row in of:
            place, taken = places.index(row["per_host"]), row["iteration_s"]
            axis.bar(
                place + 0.27 * (list(_TITLES).index(row["system"]) - 1), taken["median"], 0.25,
                color=curves.LOOKS[looks[row["system"]]].colour,
                label=_TITLES[row["system"]] if place == len(places) - 1 else None,
                yerr=[[taken["median"] - taken["low"]], [taken["high"] - taken["median"]]],
            )  # fmt: skip
        axis.axhline(of[0]["bound_s"], color="black", linewidth=1, label="bound, each byte once")
        axis.set_xticks(range(len(places)), map(str, places))
        axis.set_xlabel(f"workers on each of {HOSTS} hosts")
        axis.set_ylabel("seconds of an iteration")
        axis.set_title(f"{curves.TITLES[model]}, {rate_mbit_s(model):g} Mbit/s", fontsize=9)
    axes.flat[0].legend(fontsize=7)
    curves.foot(figure, [curves.EMULATED])
    return figure
