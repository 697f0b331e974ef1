"""Predictions as people read them: a table, what it means, and how far to trust it."""

from __future__ import annotations

from typing import List, Sequence

from p3kv.common.words import counted
from p3kv.report.forecast import DDP
from p3kv.report.forecast.forecast import MOST_HOSTS_EACH
from p3kv.report.verdict import LITTLE, bit_rate
from p3kv.tools.plan.predictions import Prediction, Series, stores

_BALANCED = "*"


def table(series: Series) -> List[str]:
    """The lines of the table: samples a second of all hosts, and how much faster p3kv is."""
    names = [store.name for store in stores(series.asked.own)]
    rows = [["", "hosts", "bandwidth", *names, f"p3kv / {series.asked.own}"]]
    rows += [_row(one, series.asked) for one in series.by_hosts]
    rows.append([])
    rows += [_row(one, series.asked) for one in series.by_bandwidth]
    widths = [max(len(row[column]) for row in rows if row) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def _row(one: Prediction, asked: Prediction) -> List[str]:
    cells = [_number(one.samples_s(store)) for store in stores(one.own)]
    if one.takes_dist_sync_as_balanced:
        cells[0] += _BALANCED
    return [
        ">" if one == asked else "", str(one.hosts), bit_rate(one.link_bit_s / 8), *cells,
        f"{one.own_s / one.forecast.p3kv_s:.2f}",
    ]  # fmt: skip


def _number(samples_s: float) -> str:
    return f"{samples_s:.0f}" if samples_s >= 100 else f"{samples_s:#.3g}"


def advice(asked: Prediction) -> str:
    """Whether the network is the limit, what p3kv gains, and what else helps."""
    found = asked.forecast
    own = asked.own
    where = f"On {counted(asked.hosts, 'host')} with {bit_rate(asked.link_bit_s / 8)}"
    waiting = 1 - found.compute_s / asked.own_s
    gain = asked.own_s / found.p3kv_s
    if waiting <= LITTLE:
        return (
            f"{where} the network is not the limit: with {own} {waiting:.1%} of a step is "
            f"waiting for it, and p3kv would be {gain - 1:.1%} faster."
        )
    left = 1 - found.compute_s / found.p3kv_s
    text = (
        f"{where} the network is the limit: with {own} {waiting:.0%} of a step is waiting for "
        f"it. p3kv would train {gain:.2f} times as fast as {own}, "
    )
    if left <= LITTLE:
        return f"{text}and computing would be the limit: {left:.1%} of a step would be waiting."
    return (
        f"{text}and {left:.0%} of a step would still be waiting: only more bandwidth or fewer "
        "bytes (P3KV_GRADIENT_CODEC, larger batches) avoid that."
    )


def caveats(shown: Sequence[Prediction]) -> List[str]:
    """In what these predictions are optimistic."""
    lines = [
        "Simulated, and optimistic: processors cost nothing, so faster networks gain less than "
        "this."
    ]
    if any(one.own == DDP for one in shown):
        lines.append(
            "DDP at best: it sends gradients in the order in which they are ready, without buckets "
            "and without a pause, and the next forward pass begins when all have come."
        )
    if any(one.takes_dist_sync_as_balanced for one in shown):
        lines.append(
            f"{_BALANCED} With more than {MOST_HOSTS_EACH} hosts, the load of dist_sync's servers "
            "is taken as balanced. It is not, so dist_sync is slower than this."
        )
    return lines
