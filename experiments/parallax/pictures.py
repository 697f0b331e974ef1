"""The pictures: throughput by hosts, by what is taken away, by workers of a host, and by alpha."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.drawing import bars, curves, output
from experiments.models.parallax import sparse_model
from experiments.parallax.cases import RATE_MBIT_S, WAYS

Table = Sequence[Mapping[str, Any]]
_CUMULATIVE = ("base", "base_rows", "base_sums", "base_parts", "p3kv")
_TAKEN_AWAY = ("no_sums", "dense", "whole", "fifo")
_COLOURS = {
    "p3kv": "#0072B2", "dist_sync": "#CC79A7", "base": "#999999", "base_rows": "#56B4E9",
    "base_sums": "#009E73", "base_parts": "#E69F00", "no_sums": "#E69F00", "dense": "#999999",
    "whole": "#009E73", "fifo": "#56B4E9",
}  # fmt: skip
_RATE = f"links of {RATE_MBIT_S:.0f} Mbit/s"


def by_hosts(table: Table) -> Figure:
    """Throughput by the number of hosts, beside what computing alone would give."""
    output.style()
    figure, axes, models = _panels(table)
    for axis, model in zip(axes, models):
        of = [row for row in table if row["model"] == model]
        hosts = sorted({row["hosts"] for row in of})
        for way in ("p3kv", "dist_sync", "horovod"):
            found = _of(of, way)
            if found:
                places = [row["hosts"] for row in found]
                curves.draw_spread(axis, way, places, _throughputs(found), label=WAYS[way].title)
        unit, one = sparse_model(model).unit, sparse_model(model).model
        ideal = [count * one.batch_size / one.compute_s for count in hosts]
        axis.plot(hosts, ideal, ":", color="black", label="computing alone")
        _log_ticks(axis, hosts)
        axis.set_yscale("log")
        axis.set_xlabel(f"hosts, one worker on each, {_RATE}")
        axis.set_ylabel(f"{unit}/s")
        _plain_y(axis)
    max(axes, key=lambda axis: len(axis.lines)).legend(fontsize=7)
    return _finished(figure)


def by_part(table: Table) -> Figure:
    """Throughput with one thing after the other, and with one taken away, by that of all."""
    output.style()
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.6))
    for axis, ways, title in (
        (axes[0], _CUMULATIVE, "one after the other"),
        (axes[1], (*_TAKEN_AWAY, "p3kv"), "one taken away"),
    ):
        _bars(axis, table, ways, "p3kv", lambda row: sparse_model(row["model"]).title)
        axis.set_title(f"{title}; {_hosts(table)}", fontsize=9)
        axis.set_ylabel("throughput, by p3kv's")
        axis.set_ylim(0, 1.5)  # for the legend
        axis.legend(fontsize=7, ncols=2, loc="upper left")
    return _finished(figure)


def by_workers(table: Table) -> Figure:
    """Throughput by workers on a host, by that without sums on hosts."""
    output.style()
    figure, axis = plt.subplots(figsize=(6.4, 3.8))
    ways = ("no_sums", "p3kv", "dist_sync")
    _bars(
        axis, table, ways, "no_sums",
        lambda row: f"{sparse_model(row['model']).title}\n{row['per_host']} on a host",
    )  # fmt: skip
    axis.set_title(f"2 hosts, {_RATE}", fontsize=9)
    axis.set_ylabel("throughput, by that without sums on hosts")
    axis.legend(fontsize=7)
    return _finished(figure)


def by_alpha(table: Table) -> Figure:
    """Throughput against the share of a model's elements that a worker uses."""
    output.style()
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    table = [row for row in table if row["model"] == "lm"]
    alphas = sorted({row["alpha"] for row in table if row["alpha"] is not None})
    for way, line in (("p3kv", "-"), ("dist_sync", "-"), ("dense", "--")):
        found = sorted(_of(table, way), key=lambda row: row["alpha"] or 0)
        if not found:
            continue
        made, places = _throughputs(found), [row["alpha"] for row in found]
        if way == "dense":
            made, places = made * len(alphas), alphas  # the same, whatever is used
        look = "p3kv" if way == "dense" else way
        label = "p3kv, dense" if way == "dense" else f"{WAYS[way].title}, rows"
        curves.draw_spread(axis, look, places, made, line, label)
    _log_ticks(axis, alphas)
    axis.set_yscale("log")
    _plain_y(axis)
    axis.invert_xaxis()
    axis.set_xlabel("alpha: share of the model's elements that a worker uses")
    axis.set_ylabel("words/s")
    axis.set_title(f"LM, {_hosts(table)}", fontsize=9)
    axis.legend(fontsize=7)
    return _finished(figure)


def _panels(table: Table) -> Tuple[Figure, List[Axes], List[str]]:
    models = list(dict.fromkeys(row["model"] for row in table))
    figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 3.6), squeeze=False)
    for axis, model in zip(axes.flat, models):
        axis.set_title(sparse_model(model).title, fontsize=9)
    return figure, list(axes.flat), models


def _bars(axis: Axes, table: Table, ways: Sequence[str], unit: str, group: Any) -> None:
    """Groups of bars, each by the throughput of the way `unit` in its group."""
    groups: Dict[str, Dict[str, curves.Spread]] = {}
    for row in table:
        if row["way"] in ways:
            groups.setdefault(group(row), {})[row["way"]] = curves.Spread(**row["throughput"])
    values = {
        name: {
            WAYS[way].title: curves.Spread(*(one / of[unit].median for one in of[way]))
            for way in ways
            if way in of
        }
        for name, of in groups.items()
        if unit in of
    }
    bars.groups(axis, values, {WAYS[way].title: _COLOURS[way] for way in ways})


def _of(table: Table, way: str) -> List[Mapping[str, Any]]:
    return [row for row in table if row["way"] == way]


def _throughputs(rows: Table) -> List[curves.Spread]:
    return [curves.Spread(**row["throughput"]) for row in rows]


def _hosts(table: Table) -> str:
    hosts, per_host = table[0]["hosts"], table[0]["per_host"]
    each = "1 worker" if per_host == 1 else f"{per_host} workers"
    return f"{hosts} hosts with {each} each, {_RATE}"


def _log_ticks(axis: Axes, places: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.xaxis.set_minor_locator(NullLocator())


def _plain_y(axis: Axes) -> None:
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, at: f"{value:,.0f}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _finished(figure: Figure) -> Figure:
    curves.foot(figure, [])
    return figure
