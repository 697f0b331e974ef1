"""A comparison as people read it: a table, what it means, and how far to trust it."""

from __future__ import annotations

from typing import Dict, List, Optional

from p3kv.config.trials import ALONE, FIFO, NATIVE, P3KV
from p3kv.report.forecast import FRAMEWORKS_OWN, Forecast
from p3kv.report.verdict import LITTLE, bit_rate, seconds
from p3kv.tools import plan
from p3kv.tools.trials import Comparison

_HEADS = (
    "", "step", "steps/s", "speed-up", "waiting", "worker CPU", "server CPU", "spread", "forecast",
)  # fmt: skip
_WIDE = 0.1
"""Rounds that are further apart say little of smaller differences."""
_NONSENSE = -0.5
"""A forecast that promises half of what a step takes knows nothing of what takes the time."""
_FAR = 0.15
"""A forecast that is further from what was measured says little of other networks."""


def table(found: Comparison, forecast: Optional[Forecast]) -> List[str]:
    """The lines of the table; `forecast` is for the network on which it was measured."""
    expected: Dict[str, float] = {}
    if forecast is not None:
        expected = {
            NATIVE: forecast.own_s(found.own), FIFO: forecast.fifo_s, P3KV: forecast.p3kv_s
        }  # fmt: skip
    rows = [_HEADS]
    for store, measured in found.measured.items():
        stores = store != ALONE
        rows.append((
            found.title(store),
            seconds(measured.step_s),
            f"{1 / measured.step_s:.3g}",
            f"{found.measured[found.base].step_s / measured.step_s:.2f}" if stores else "",
            f"{found.waiting(store):.0%}" if stores else "",
            seconds(measured.worker_s),
            seconds(measured.server_s) if stores and store != NATIVE else "",
            f"{measured.spread:.0%}" if len(measured.steps_s) > 1 else "",
            seconds(expected[store]) if store in expected else "",
        ))  # fmt: skip
    shown = [column for column in range(len(_HEADS)) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in shown}
    first, *others = shown
    return [
        "  ".join(
            [row[first].ljust(widths[first]), *(row[n].rjust(widths[n]) for n in others)]
        ).rstrip()
        for row in rows
    ]


def verdict(found: Comparison) -> str:
    """Whether p3kv helps, in a sentence or two."""
    ours, theirs = found.measured[P3KV].step_s, found.measured[found.base].step_s
    other = found.title(found.base)
    if _says_nothing(found):
        return (
            f"The rounds are up to {found.spread:.0%} apart, which is more than steps differ: "
            "this says nothing. Take hosts on which nothing else runs, more --steps or --rounds."
        )
    if found.base != NATIVE:
        return (
            f"{found.title(NATIVE)} can't train this script: its job has failed. Priorities make "
            f"p3kv {theirs / ours:.2f} times as fast as first in, first out."
        )
    speed_up = theirs / ours
    before, after = found.waiting(found.base), found.waiting(P3KV)
    if speed_up < 1 - LITTLE:
        return (
            f"A step takes {1 / speed_up:.2f} times as long with p3kv as with {other} here: stay "
            f"with {other}. The hosts may have no processor time to spare for p3kv."
        )
    if speed_up < 1 + LITTLE:
        why = (
            f"with {other} only {before:.0%} of a step is waiting"
            if before <= 2 * LITTLE
            else f"{after:.0%} of a step is waiting with p3kv, too"
        )
        return f"p3kv is as fast as {other} here: {why}."
    text = (
        f"p3kv is {speed_up:.2f} times as fast as {other} here: {after:.0%} of a step is waiting "
        f"instead of {before:.0%}."
    )
    priorities = found.measured[FIFO].step_s / ours
    if priorities > 1 + LITTLE:
        text += f" Of this, a factor of {priorities:.2f} is what the priorities gain."
    return text


def _says_nothing(found: Comparison) -> bool:
    """Whether the rounds of a store are further apart than the stores are."""
    speed_up = found.measured[found.base].step_s / found.measured[P3KV].step_s
    return found.spread > _WIDE and abs(speed_up - 1) < found.spread


def about_codecs(found: Comparison) -> str:
    """Which codec is the fastest, what it is worth and costs, and from where on each gains
    something; empty if none was compared."""
    titles = found.with_codecs
    if not titles:
        return ""
    best = min(titles, key=lambda title: found.measured[title].step_s)
    gain = found.measured[P3KV].step_s / found.measured[best].step_s
    pays = "; ".join(
        f"{_codec(title)} on links below {bit_rate(found.pays_below_bit_s(title) / 8)} "
        f"({seconds(found.codec_s(title))} more of a processor in each step)"
        for title in titles
    )
    pays = f"Codecs can gain something where sending takes longer than computing: {pays}."
    if gain < 1 + max(LITTLE, found.spread):
        return (
            "No codec makes a step faster here by more than the rounds differ: keep the exact "
            f"numbers. {pays}"
        )
    return (
        f"With {_codec(best)} a step is {gain:.2f} times as fast as with exact p3kv. "
        f"Codecs change the numbers: see whether your model learns as well with it. {pays}"
    )


def _codec(title: str) -> str:
    return title.partition(", ")[2]


def outlook(found: Comparison, forecast: Optional[Forecast]) -> List[str]:
    """Forecast for other networks, and how far it is from what was measured."""
    if _says_nothing(found):
        return ["No forecast for other networks: it would rest on these numbers."]
    rate = found.link_bit_s
    if forecast is None or rate is None:
        why = "p3kv does not measure the network if P3KV_SLICE_SIZE is set"
        if found.own not in FRAMEWORKS_OWN:
            why = f"the simulator does not know {found.own}"
        elif not found.sends_all:
            why = "the simulator knows no sparse gradients and no codecs"
        elif found.shares_links:
            why = "the simulator knows hosts with one worker each"
        return [f"No forecast for other networks: {why}."]
    measured_s = found.measured[P3KV].step_s
    off = forecast.p3kv_s / measured_s - 1
    if off < _NONSENSE:
        return [
            f"No forecast for other networks: by simulation a step with p3kv takes "
            f"{seconds(forecast.p3kv_s)} here, and not {seconds(measured_s)}. What it takes is "
            "processor time, more than the network."
        ]
    series = plan.predict(found.workload, 1, found.workers, rate, found.own)
    sizes = series.workload.layer_bytes
    lines = [
        f"Forecast for other networks: batches/s of all workers together, by simulation with this "
        f"script's {sum(map(bool, sizes))} arrays ({sum(sizes) / 1e6:.3g} MB), a forward pass of "
        f"{seconds(sum(series.workload.forward_s))}, a backward pass of "
        f"{seconds(sum(series.workload.backward_s))}, and links of {bit_rate(rate / 8)} as "
        "p3kv has measured them.",
        "\n".join(plan.table(series)),
    ]
    if abs(off) > _FAR:
        lines.append(
            f"Here the forecast for p3kv is {abs(off):.0%} too {'long' if off > 0 else 'short'}: "
            "do not rely on it for other networks."
        )
    return [*lines, *plan.caveats([*series.by_hosts, *series.by_bandwidth])]


def notes(found: Comparison) -> List[str]:
    """In what the trials were not alike."""
    told = [
        note
        for measured in found.measured.values()
        for reports in measured.trials
        for report in reports
        for note in report.notes
    ]
    return list(dict.fromkeys(told))
