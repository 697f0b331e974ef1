"""Throughput against the share of rows that workers touch: a table and a picture."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter, NullLocator

from experiments.drawing import curves, output

_LINES = {"rows": "-", "dense": "--"}
_TITLES = {"dist_sync": "MXNet dist_sync", "p3kv": "p3kv"}


def summarize(runs: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """A row for each table, way, share and rate: seconds of an iteration by system, and bytes."""
    found = {tuple(run[name] for name in _WHAT) for run in runs}
    unlimited = float("inf")
    ordered = sorted(
        found, key=lambda one: (*one[:3], -(one[3] or unlimited), one[4]), reverse=True
    )
    return [_row(runs, dict(zip(_WHAT, one))) for one in ordered]


_WHAT = ("rows", "way", "share", "rate_mbit_s", "columns")


def _row(runs: Sequence[Mapping[str, Any]], what: Mapping[str, Any]) -> Dict[str, Any]:
    row: Dict[str, Any] = {**what, "systems": {}}
    for system in _TITLES:
        of = curves.select(runs, **what, system=system)
        if not of:
            continue
        numbers: Dict[str, Any] = {
            "runs": len(of),
            "iteration_s": curves.iteration_s(of)._asdict(),
            "link_bytes": max(run["link_bytes"] for run in of),
        }
        for name in ("sent_share", "received_share"):
            if name in of[0]:
                numbers[name] = max(run[name] for run in of)
        row["systems"][system] = numbers
    return row


def table_text(table: Sequence[Mapping[str, Any]]) -> str:
    """`summarize`'s table as text."""
    lines = []
    for row in table:
        for system, of in row["systems"].items():
            taken = of["iteration_s"]
            shares = [f"{of[name]:.3f}" for name in ("sent_share", "received_share") if name in of]
            lines.append(
                f"{row['rows']:>7} x {row['columns']:<3} {row['way']:<5} {row['share']:<5g} "
                f"{row['rate_mbit_s'] or 'no limit':>8} {system:<9} "
                f"{taken['median']:.3f} s ({taken['low']:.3f} to {taken['high']:.3f}), link "
                f"{of['link_bytes'] / 1e6:.1f} MB {' '.join(shares)}"
            )
    return "\n".join(lines)


def draw(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws iterations a second of the table that has several shares."""
    output.style()
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    swept = min(row["rows"] for row in table)
    table = [row for row in table if row["rows"] == swept and row["rate_mbit_s"] == 25]
    shares = sorted({row["share"] for row in table})
    for way, line in _LINES.items():
        for system, title in _TITLES.items():
            of = [row for row in table if row["way"] == way and system in row["systems"]]
            if not of:
                continue
            seconds = [curves.Spread(**row["systems"][system]["iteration_s"]) for row in of]
            rates = [curves.throughput(one, 1) for one in seconds]
            places = [row["share"] for row in of]
            if way == "dense":
                # It sends the same, however many rows are touched.
                places, rates = shares, rates * len(shares)
            curves.draw_spread(axis, system, places, rates, line, f"{title}, {way}")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.invert_xaxis()
    axis.set_xticks(shares, [f"{share:g}" for share in shares])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("share of rows that a worker touches")
    axis.set_ylabel("iterations/s")
    axis.set_title(f"a table of {swept:,} x 512, 4 hosts, 25 Mbit/s, no computation", fontsize=9)
    axis.legend(fontsize=7, framealpha=0.9)
    return figure
