"""The traces of all processes of a job, on one clock."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Deque, Dict, Iterable, Iterator, List, NamedTuple, Tuple

import numpy as np

from p3kv.common.tracing import RECEIVE, SEND, SUFFIX, KeyName, Process, Span, Trace, read_trace
from p3kv.errors import TraceError
from p3kv.tools.timeline.clocks import aligned, uncertainty_ns


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


class Pair(NamedTuple):
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


def pairs(timeline: Timeline) -> Iterator[Pair]:
    """All slices of which both ends are traced.

    Slices of the same key, number and round between two processes arrive in the order in which they
    left.
    """
    Place = Tuple[int, int, int, int, int]
    by_rank = {(one.role, one.rank): one for one in timeline.processes}
    for role, other in (("worker", "server"), ("server", "worker")):
        sent: Dict[Place, Deque[Span]] = defaultdict(deque)
        for sender in timeline.of_role(role):
            for span in sender.spans:
                if span.kind == SEND:
                    sent[_place(span, sender.rank, span.peer)].append(span)
        for receiver in timeline.of_role(other):
            for span in receiver.spans:
                place = _place(span, span.peer, receiver.rank)
                if span.kind == RECEIVE and sent[place]:
                    yield Pair(by_rank[role, span.peer], sent[place].popleft(), receiver, span)


def _place(span: Span, sender: int, receiver: int) -> Tuple[int, int, int, int, int]:
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
