"""The traces of a job put together: on one clock, by iteration, and as a file for Perfetto."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from itertools import groupby
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from p3kv.common.tracing import (
    APPLIED,
    FORWARD_BEGIN,
    FORWARD_END,
    READY,
    RECEIVE,
    SEND,
    SUFFIX,
    SUM,
    UNKNOWN,
    UPDATE,
    ClockSample,
    KeyName,
    Process,
    Span,
    Trace,
    read_trace,
)
from p3kv.errors import TraceError

_NEAR_NS = 30_000_000_000
"""Clocks that differ by 100 parts per million, which is much, move 3 ms apart in this time."""


def best_samples(samples: Sequence[ClockSample]) -> List[ClockSample]:
    """The samples that count, in order of their times: those with a shorter round trip than all
    others near them."""
    ordered = sorted(samples)
    times = [sample.at_ns for sample in ordered]
    best = []
    for sample in ordered:
        start = bisect_left(times, sample.at_ns - _NEAR_NS)
        near = ordered[start : bisect_right(times, sample.at_ns + _NEAR_NS)]
        if sample == min(near, key=lambda other: other.round_trip_ns):
            best.append(sample)
    return best


def is_shared(samples: Sequence[ClockSample]) -> bool:
    """Whether a process has the scheduler's clock: both are on one machine. Clocks of two machines
    count from two starts, and no round trip is as long as the time between these."""
    return all(abs(sample.offset_ns) <= sample.round_trip_ns // 2 + 1 for sample in samples)


def aligned(times_ns: np.ndarray, samples: Sequence[ClockSample]) -> np.ndarray:
    """int64 times of a process as the scheduler's; `samples` are those of the process.

    The offset changes evenly between samples, and is constant before the first and after the last.
    Without samples the times stay as they are.
    """
    if is_shared(samples):
        return times_ns
    best = best_samples(samples)
    at_ns = [sample.at_ns for sample in best]
    offsets = np.interp(times_ns, at_ns, [float(sample.offset_ns) for sample in best])
    shifted: np.ndarray = times_ns + offsets.round().astype(np.int64)
    return shifted


def uncertainty_ns(samples: Sequence[ClockSample]) -> int:
    """By how much an aligned time is wrong at most, as long as the clocks' rates are constant."""
    if is_shared(samples):
        return 0
    return max(sample.round_trip_ns // 2 for sample in best_samples(samples))


class Traced(NamedTuple):
    """One process, with its times on the scheduler's clock."""

    role: str
    rank: int
    process: Process
    spans: List[Span]
    """In order of their starts."""
    uncertainty_ns: int
    """By how much its times are wrong at most."""
    has_clock: bool
    """Whether it is known how far its clock is from the scheduler's."""


class Timeline(NamedTuple):
    """A job: workers and then servers, by rank."""

    processes: List[Traced]
    keys: Dict[int, KeyName]
    """By id."""

    def name(self, key_id: int) -> str:
        """Name of a key for people."""
        key = self.keys.get(key_id)
        return f"key {key_id}" if key is None else key.name or str(key.key)

    def of_role(self, role: str) -> List[Traced]:
        """All that were "worker" or "server"."""
        return [one for one in self.processes if one.role == role]

    def is_local(self, one: Traced, span: Span) -> bool:
        """Whether a slice stays on its host, and passes no link; False if all are on one host."""
        other = "server" if one.role == "worker" else "worker"
        hosts = {traced.process.host for traced in self.processes}
        peers = {traced.rank: traced.process.host for traced in self.of_role(other)}
        return len(hosts) > 1 and peers.get(span.peer) == one.process.host


class TracedSlice(NamedTuple):
    """A slice that has left one process and arrived at another."""

    sender: Traced
    sent: Span
    receiver: Traced
    received: Span


def read_job(folder: Path) -> Timeline:
    """Reads all traces in a folder. Raises TraceError if there is none."""
    traces = [read_trace(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not traces:
        raise TraceError(
            f"there is no trace in {folder}. Set P3KV_TRACE to a folder in all processes of a "
            f"job, and copy what they write (*{SUFFIX}) into one folder."
        )
    keys = {key_id: name for trace in traces for key_id, name in trace.keys.items()}
    processes = [_traced(trace) for trace in traces]
    return Timeline(sorted(processes, key=lambda one: (one.role != "worker", one.rank)), keys)


def pairs(timeline: Timeline) -> Iterator[TracedSlice]:
    """Slices that have left one traced process and arrived at another. Those of one key, number and
    round between two processes arrive in the order in which they left."""
    by_rank = {(one.role, one.rank): one for one in timeline.processes}
    for role, other in (("worker", "server"), ("server", "worker")):
        sent: Dict[Tuple[int, ...], Deque[Span]] = defaultdict(deque)
        for sender in timeline.of_role(role):
            for span in sender.spans:
                if span.kind == SEND:
                    sent[_place(span, sender.rank, span.peer)].append(span)
        for receiver in timeline.of_role(other):
            for span in receiver.spans:
                place = _place(span, span.peer, receiver.rank)
                if span.kind == RECEIVE and sent[place]:
                    yield TracedSlice(
                        by_rank[role, span.peer], sent[place].popleft(), receiver, span
                    )


def _place(span: Span, sender: int, receiver: int) -> Tuple[int, ...]:
    return sender, receiver, span.key_id, span.slice, span.round


def _traced(trace: Trace) -> Traced:
    role, _, rank = trace.process.name.partition(" ")
    times = np.array([span[2:5] for span in trace.spans], np.int64).reshape(-1, 3)
    shifted = aligned(times, trace.clock).tolist()
    spans = _one_after_the_other(
        span._replace(since_ns=since, start_ns=start, end_ns=end)
        for span, (since, start, end) in zip(trace.spans, shifted)
    )
    error_ns = uncertainty_ns(trace.clock)
    return Traced(role, int(rank), trace.process, spans, error_ns, bool(trace.clock))


def _one_after_the_other(spans: Iterable[Span]) -> List[Span]:
    """The spans in order of their starts. Small frames are handed to a link in one call: each lasts
    until the next begins, so no two of a connection and direction overlap."""
    ordered: List[Span] = []
    newest: Dict[Tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        before = newest.get((span.kind, span.peer))
        if before is not None and ordered[before].end_ns > span.start_ns:
            ordered[before] = ordered[before]._replace(end_ns=span.start_ns)
        if span.kind in (SEND, RECEIVE):
            newest[span.kind, span.peer] = len(ordered)
        ordered.append(span)
    return ordered


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


Event = Dict[str, Any]

_COMPUTE = "compute"
_TRACKS = {
    "worker": (_COMPUTE, READY, SEND, RECEIVE, APPLIED),
    "server": (RECEIVE, SUM, UPDATE, SEND),
}
"""Tracks of a process, from top to bottom."""
_TRACK_NAMES = {READY: "gradients ready", APPLIED: "values applied", SUM: "sum", UPDATE: "update"}


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Writes the trace, an event a line. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for event in events(timeline):
            file.write(separator + encode(event))
            separator = b",\n"
        file.write(b"\n]}\n")


def events(timeline: Timeline) -> Iterator[Event]:
    """All events; times are in microseconds from the job's first span on."""
    first_ns = min((span.since_ns for one in timeline.processes for span in one.spans), default=0)
    writer = _Writer(timeline, first_ns)
    for pid, one in enumerate(timeline.processes, 1):
        yield from writer.process(pid, one)
    yield from writer.flows()


class _Writer:
    def __init__(self, timeline: Timeline, first_ns: int) -> None:
        self._timeline = timeline
        self._first_ns = first_ns
        self._pids = {(one.role, one.rank): pid for pid, one in enumerate(timeline.processes, 1)}

    def process(self, pid: int, one: Traced) -> Iterator[Event]:
        yield from self._names(pid, one)
        if one.role == "worker":
            yield from self._compute(pid, one)
        for span in one.spans:
            if span.kind not in _TRACKS[one.role]:
                continue
            name = self._timeline.name(span.key_id)
            event = self._event(span.kind, name, pid, _tid(pid, one.role, span.kind, span.peer))
            event["args"] = _details(span)
            if span.kind in (READY, APPLIED):
                yield {**event, "ph": "i", "s": "t", "ts": self._us(span.end_ns)}
            else:
                yield self._lasting(event, span.start_ns, span.end_ns)
        yield from self._queue(pid, one)

    def flows(self) -> Iterator[Event]:
        """Arrows from where slices leave to where they arrive."""
        for number, (sender, sent, receiver, received) in enumerate(pairs(self._timeline), 1):
            what = "gradient" if sender.role == "worker" else "value"
            for phase, one, span in (("s", sender, sent), ("f", receiver, received)):
                pid = self._pids[one.role, one.rank]
                tid = _tid(pid, one.role, span.kind, span.peer)
                event = self._event("slice", what, pid, tid)
                at_us = self._us(span.start_ns)
                yield {**event, "ph": phase, "bp": "e", "id": number, "ts": at_us}

    def _names(self, pid: int, one: Traced) -> Iterator[Event]:
        name = f"{one.process.name} ({one.process.host})"
        yield _meta(pid, 0, "process_name", name=name)
        yield _meta(pid, 0, "process_sort_index", sort_index=pid)
        peer = "server" if one.role == "worker" else "worker"
        tracks = {
            _tid(pid, one.role, span.kind, span.peer): span
            for span in one.spans
            if span.kind in _TRACKS[one.role]
        }
        names = {
            tid: _TRACK_NAMES.get(span.kind, f"{_direction(span)} {peer} {span.peer}")
            for tid, span in tracks.items()
        }
        if one.role == "worker":
            names[_tid(pid, one.role, _COMPUTE)] = _COMPUTE
        for tid, track in sorted(names.items()):
            yield _meta(pid, tid, "thread_name", name=track)
            yield _meta(pid, tid, "thread_sort_index", sort_index=tid)

    def _compute(self, pid: int, worker: Traced) -> Iterator[Event]:
        for one in passes(worker):
            name = FORWARD if one.phase == FORWARD else self._timeline.name(one.key_id)
            event = self._event(one.phase, name, pid, _tid(pid, worker.role, _COMPUTE))
            event["args"] = {"step": one.step}
            if one.phase == BACKWARD:
                event["args"]["of"] = "the gradient of this parameter"
            yield self._lasting(event, one.start_ns, one.end_ns)

    def _queue(self, pid: int, one: Traced) -> Iterator[Event]:
        """How many bytes wait to be sent."""
        changes: List[Tuple[int, int]] = []
        for span in one.spans:
            if span.kind == SEND:
                changes += [(span.since_ns, span.size_bytes), (span.start_ns, -span.size_bytes)]
        queued = 0
        for at_ns, change in sorted(changes):
            queued += change
            event = self._event("queue", "bytes queued", pid, 0)
            yield {**event, "ph": "C", "ts": self._us(at_ns), "args": {"bytes": queued}}

    def _event(self, category: str, name: str, pid: int, tid: int) -> Event:
        return {"name": name, "cat": category, "pid": pid, "tid": tid}

    def _lasting(self, event: Event, start_ns: int, end_ns: int) -> Event:
        return {**event, "ph": "X", "ts": self._us(start_ns), "dur": (end_ns - start_ns) / 1000}

    def _us(self, time_ns: int) -> float:
        return (time_ns - self._first_ns) / 1000


def _meta(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _tid(pid: int, role: str, kind: str, peer: int = UNKNOWN) -> int:
    """A track's number, which no other process has: readers take it for a thread of the system."""
    lane = peer if kind in (SEND, RECEIVE) else 0
    return (pid << 20) + (_TRACKS[role].index(kind) << 16) + lane


def _direction(span: Span) -> str:
    return "send to" if span.kind == SEND else "receive from"


def _details(span: Span) -> Dict[str, Any]:
    details = {
        "round": span.round,
        "step": span.step,
        "slice": span.slice,
        "priority": span.priority,
        "bytes": span.size_bytes,
        "peer": span.peer,
    }
    known: Dict[str, Any] = {
        name: number for name, number in details.items() if number >= 0 or name == "priority"
    }
    if span.kind == SEND:
        known["queued_ms"] = (span.start_ns - span.since_ns) / 1e6
    return known
