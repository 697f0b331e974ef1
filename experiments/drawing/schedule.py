"""What a worker and its host's link do around the delay between two iterations.

A schedule comes from the simulator or from the traces of a measured run of p3kv; both give the
same bars, so they can be drawn one above the other.
"""

from __future__ import annotations

import statistics
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from experiments.campaign.measure import Run
from p3kv.report.forecast import Model
from p3kv.report.forecast.bound import payload_bytes_s
from p3kv.report.forecast.simulator import FLOAT32_BYTES, Event, Policy, simulate
from p3kv.tools.timeline import pairs, read_job

ACCELERATOR = "accelerator"
ROWS = (ACCELERATOR, "gradients out", "parameters out", "gradients in", "parameters in")
"""What is drawn, from top to bottom. A host's worker sends gradients out to the servers of other
hosts, and gets parameters in from them; its server sends and gets the opposite."""

_SETTLED = 3
"""The first iteration of a simulation that is like those after it."""
_TURN_S = 0.005
"""Pauses that a trace's reader need not see."""


class Bar(NamedTuple):
    """Something in one row of a schedule, in seconds.

    `what` is "forward" or "backward" on the accelerator and "gradient" or "parameter" on the
    link. A bar on the link lasts from when its bytes could be sent to when the last one arrived.
    `iteration` is that of the gradient.
    """

    row: str
    what: str
    layer: int
    iteration: int
    start_s: float
    end_s: float


class Schedule(NamedTuple):
    """What host 0 did over several iterations.

    `delay_s`: from each end of a backward pass to the start of the next forward pass.
    `waiting_s`: in the same iterations, how long the accelerator waited in all, which is more when
    a layer's parameters come after those of the layer before are used up. `bars` show a backward
    pass and the forward pass that follows; times begin with theirs.
    """

    delay_s: List[float]
    waiting_s: List[float]
    bars: List[Bar]

    @property
    def numbers(self) -> Dict[str, Any]:
        """For JSON, with medians."""
        return {
            "delay_s": [_rounded(seconds) for seconds in self.delay_s],
            "median_delay_s": _rounded(statistics.median(self.delay_s)),
            "waiting_s": [_rounded(seconds) for seconds in self.waiting_s],
            "median_waiting_s": _rounded(statistics.median(self.waiting_s)),
            "bars": [
                bar._replace(start_s=_rounded(bar.start_s), end_s=_rounded(bar.end_s))._asdict()
                for bar in self.bars
            ],
        }


def simulated(
    model: Model, slice_elems: int, priority: bool, hosts: int, link_bit_s: float
) -> Schedule:
    """The schedule of p3kv on links without latency and processors that cost nothing."""
    policy = Policy(slice_elems, priority, pulls=False, oldest_round_first=True)
    result = simulate(
        model.workload, policy, hosts, link_bit_s, iterations=2 * _SETTLED, timeline=True
    )
    bars = [_simulated_bar(event) for event in result.timeline]
    # Gradients and parameters take turns on a link, slice by slice; in a trace both are under way.
    turn_s = 2.5 * slice_elems * FLOAT32_BYTES / payload_bytes_s(link_bit_s)
    return schedule(bars, _SETTLED, model, turn_s)


def measured(model: Model, run: Run, traces: Path) -> Schedule:
    """The schedule that `run`, measured with spans, has left in the folder `traces`."""
    layers = [layer.name for layer in model.layers]
    bars = [
        Bar(
            ACCELERATOR,
            span["phase"],
            layers.index(span["layer"]),
            span["iteration"],
            span["start_ns"] / 1e9,
            span["end_ns"] / 1e9,
        )
        for span in run.spans[0]
    ]
    keys = model.keys
    layer_of = {
        str(keys[parameter.name]): index
        for index, layer in enumerate(model.layers)
        for parameter in layer.parameters
    }
    bars += _traced_bars(traces, layer_of)
    count = len(run.iteration_s)
    return schedule(bars, max(bar.iteration for bar in bars) + 1 - count, model, _TURN_S)


def schedule(bars: Iterable[Bar], first: int, model: Model, turn_s: float) -> Schedule:
    """Measures the delays from iteration `first` on, and takes out the bars of a typical one.

    Bars of one row and layer that follow each other within `turn_s` become one.
    """
    bars = list(bars)
    computing = [bar for bar in bars if bar.row == ACCELERATOR]
    begin_s = {b.iteration: b.start_s for b in computing if (b.what, b.layer) == ("forward", 0)}
    end_s = {b.iteration: b.end_s for b in computing if (b.what, b.layer) == ("backward", 0)}
    last = len(model.layers) - 1
    forwarded_s = {
        b.iteration: b.end_s for b in computing if (b.what, b.layer) == ("forward", last)
    }
    pairs = [i for i in sorted(end_s) if i >= first and i + 1 in end_s]
    compute_s = {
        i: sum(b.end_s - b.start_s for b in computing if b.iteration == i) for i in sorted(end_s)
    }
    delay_s = [begin_s[i + 1] - end_s[i] for i in pairs]
    waiting_s = [end_s[i + 1] - end_s[i] - compute_s[i + 1] for i in pairs]
    # Of an even number, the median of all would be nobody's.
    middle = statistics.median_low(waiting_s)
    typical = pairs[waiting_s.index(middle)]
    from_s, to_s = forwarded_s[typical], forwarded_s[typical + 1]
    window = [
        bar._replace(start_s=max(bar.start_s, from_s) - from_s, end_s=min(bar.end_s, to_s) - from_s)
        for bar in bars
        if bar.end_s > from_s and bar.start_s < to_s
    ]
    return Schedule(delay_s, waiting_s, _merged(window, turn_s))


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _merged(bars: Sequence[Bar], turn_s: float) -> List[Bar]:
    merged: List[Bar] = []
    for bar in sorted(bars, key=lambda bar: (ROWS.index(bar.row), bar.start_s, bar.end_s)):
        before = merged[-1] if merged else None
        if before and before[:4] == bar[:4] and bar.start_s - before.end_s <= turn_s:
            merged[-1] = before._replace(end_s=max(before.end_s, bar.end_s))
        else:
            merged.append(bar)
    return merged


def _simulated_bar(event: Event) -> Bar:
    if event.lane == "compute":
        row, what = ACCELERATOR, event.kind
    else:
        what = {"push": "gradient", "broadcast": "parameter"}[event.kind]
        row = f"{what}s {'out' if event.lane == 'up' else 'in'}"
    return Bar(row, what, event.layer, event.iteration, event.start_s, event.end_s)


class _Transfer(NamedTuple):
    """A slice on its way between a worker and a server, in seconds."""

    what: str
    worker: int
    server: int
    layer: int
    iteration: int
    queued_s: float
    arrived_s: float


def _traced_bars(folder: Path, layer_of: Dict[str, int]) -> Iterator[Bar]:
    """What passes host 0's link.

    A slice's bar begins when the slice before it on the same connection arrived, if it was queued
    by then: before that it could not be sent.
    """
    crossing = [t for t in _transfers(folder, layer_of) if t.worker != t.server]

    def connection(transfer: _Transfer) -> Tuple[str, int, int]:
        return transfer[:3]

    for (what, worker, server), group in groupby(sorted(crossing, key=connection), connection):
        if 0 not in (worker, server):
            continue
        out = (worker == 0) == (what == "gradient")
        row = f"{what}s {'out' if out else 'in'}"
        free_s = 0.0
        for transfer in sorted(group, key=lambda transfer: transfer.arrived_s):
            start_s = max(transfer.queued_s, free_s)
            free_s = transfer.arrived_s
            yield Bar(row, what, transfer.layer, transfer.iteration, start_s, free_s)


def _transfers(folder: Path, layer_of: Dict[str, int]) -> Iterator[_Transfer]:
    """All slices of all rounds but the first values, in both directions."""
    timeline = read_job(folder)
    for sender, sent, receiver, received in pairs(timeline):
        if sent.round == 0:
            continue
        is_gradient = sender.role == "worker"
        worker, server = (sender, receiver) if is_gradient else (receiver, sender)
        yield _Transfer(
            "gradient" if is_gradient else "parameter",
            worker.rank,
            server.rank,
            layer_of[str(timeline.keys[sent.key_id].key)],
            sent.round - 1,
            sent.since_ns / 1e9,
            received.end_ns / 1e9,
        )
