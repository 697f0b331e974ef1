"""A job's timeline in Chrome's trace event format, for Perfetto.

The format: "Trace Event Format", Google, 2016. Events of one track must nest, or not overlap; so
each kind of work has a track, and each connection one in each direction.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import msgspec

from p3kv.common.tracing import APPLIED, READY, RECEIVE, SEND, SUM, UNKNOWN, UPDATE, Span
from p3kv.tools.timeline.passes import BACKWARD, FORWARD, passes
from p3kv.tools.timeline.timeline import Timeline, Traced, pairs

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
