"""Passes that a worker computed and when, and the parts of an iteration.

A worker records when each gradient became ready and when the forward pass ended. So a parameter's
backward operation lasts from when the gradient before it was ready, and the forward pass from when
the first layer had its value. In between it may have waited for other layers' values: that is not
known.
"""

from __future__ import annotations

import statistics
from itertools import groupby
from typing import Dict, List, NamedTuple, Optional, Tuple

from p3kv.common.tracing import (
    APPLIED,
    FORWARD_BEGIN,
    FORWARD_END,
    READY,
    RECEIVE,
    SEND,
    UNKNOWN,
    Span,
)
from p3kv.tools.timeline.timeline import Timeline, Traced

FORWARD, BACKWARD = "forward", "backward"
_WARM_UP = 2
"""Steps that are not like those after them."""

Interval = Tuple[int, int]


class Pass(NamedTuple):
    """A forward pass, or a part of a backward pass: what gave the gradient of one key."""

    phase: str
    key_id: int
    step: int
    start_ns: int
    end_ns: int


class Iteration(NamedTuple):
    """From the end of a forward pass to that of the next one, on one worker. Times in seconds.

    Where these ends are not known, it lasts from one backward pass's first gradient to the next's.
    """

    worker: int
    step: int
    start_ns: int
    end_ns: int
    compute_s: float
    link_s: float
    """For how long slices were sent or received."""
    overlap_s: float
    """For how long both went on."""
    whole: bool
    """Whether it is known when the forward pass ended, and so what was computed."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def overlap(self) -> Optional[float]:
        """The part of the communication during which the worker computed; None if not known."""
        return self.overlap_s / self.link_s if self.link_s and self.whole else None

    @property
    def compute_idle(self) -> Optional[float]:
        """The least part of the iteration in which the worker did not compute; None if not
        known."""
        return 1 - self.compute_s / self.seconds if self.whole else None

    @property
    def link_idle(self) -> float:
        """The part of the iteration in which it neither sent nor received a slice."""
        return 1 - self.link_s / self.seconds


def passes(worker: Traced) -> List[Pass]:
    """Passes that a worker computed, in order."""
    begins = [span.end_ns for span in worker.spans if span.kind == FORWARD_BEGIN]
    ends = [span.end_ns for span in worker.spans if span.kind == FORWARD_END]
    applied = {(s.key_id, s.step): s.end_ns for s in worker.spans if s.kind == APPLIED}
    first_keys = _first_keys(worker)
    found: List[Pass] = []
    before_ns, before = 0, UNKNOWN
    for step, ready in _ready_by_step(worker).items():
        forward_end = [end for end in ends if before_ns < end <= ready[0].end_ns]
        at_ns = forward_end[-1] if forward_end else ready[0].end_ns
        if forward_end and before != UNKNOWN:
            start_ns = max(before_ns, applied.get((first_keys.get(before, UNKNOWN), before), 0))
            start_ns = next((one for one in begins if start_ns < one < at_ns), start_ns)
            found.append(Pass(FORWARD, UNKNOWN, step, min(start_ns, at_ns), at_ns))
        for span in ready:
            found.append(Pass(BACKWARD, span.key_id, step, at_ns, span.end_ns))
            at_ns = span.end_ns
        before_ns, before = at_ns, step
    return found


def iterations(timeline: Timeline, worker: Traced) -> List[Iteration]:
    """All whole iterations of a worker."""
    computed = passes(worker)
    starts: Dict[int, int] = {}
    for one in computed:
        if one.phase == BACKWARD:
            starts.setdefault(one.step, one.start_ns)
    forwards = {one.step for one in computed if one.phase == FORWARD}
    computing = _union([(one.start_ns, one.end_ns) for one in computed])
    link = _union([
        (span.start_ns, span.end_ns)
        for span in worker.spans
        if span.kind in (SEND, RECEIVE) and not timeline.is_local(worker, span)
    ])  # fmt: skip
    both = _common(computing, link)
    steps = list(starts)
    found = []
    for step, following in zip(steps, steps[1:]):
        start, end = starts[step], starts[following]
        if start < end:
            compute_s, link_s, both_s = (
                _inside(intervals, start, end) for intervals in (computing, link, both)
            )
            whole = following in forwards
            found.append(Iteration(worker.rank, step, start, end, compute_s, link_s, both_s, whole))
    return found


def typical(found: List[Iteration]) -> Optional[Iteration]:
    """The iteration of median length; the first ones count only if there are no others."""
    settled = found[_WARM_UP:] or found
    if not settled:
        return None
    # Of an even number, the median of all would be nobody's.
    middle = statistics.median_low(one.seconds for one in settled)
    return next(one for one in settled if one.seconds == middle)


def percent(part: Optional[float]) -> str:
    """For people: '42%', or 'unknown'."""
    return "unknown" if part is None else f"{part:.0%}"


def _ready_by_step(worker: Traced) -> Dict[int, List[Span]]:
    ready = sorted(
        (span for span in worker.spans if span.kind == READY), key=lambda s: (s.step, s.end_ns)
    )
    return {step: list(spans) for step, spans in groupby(ready, key=lambda span: span.step)}


def _first_keys(worker: Traced) -> Dict[int, int]:
    """By step, the key that the next forward pass needs first: that with the highest priority."""
    first: Dict[int, Tuple[int, int]] = {}
    for span in worker.spans:
        if span.kind == SEND and span.step != UNKNOWN:
            urgent = (span.priority, span.key_id)
            first[span.step] = max(first.get(span.step, urgent), urgent)
    return {step: key_id for step, (_, key_id) in first.items()}


def _union(intervals: List[Interval]) -> List[Interval]:
    joined: List[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _common(one: List[Interval], other: List[Interval]) -> List[Interval]:
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _inside(intervals: List[Interval], start: int, end: int) -> float:
    """How many seconds of the intervals, which do not overlap, are between two times."""
    return sum(max(0, min(e, end) - max(s, start)) for s, e in intervals) / 1e9
