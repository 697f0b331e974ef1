"""An event-driven simulation of pipelines: when each worker computes which batch.

Every worker is on a host of its own behind one full-duplex link. As in `p3kv.report.forecast`, a
message occupies its sender's uplink and, at the same time or later if it is busy, its receiver's
downlink. Messages travel while workers compute. Updates of weights take no time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, Callable, List, NamedTuple, Sequence, Set, Tuple

from experiments.dualpipe.partition import Stage
from experiments.dualpipe.plans import BACKWARD, FORWARD, Pass, Plan, Step, input_of


class Computed(NamedTuple):
    """A step of a worker, and when it was computed, in seconds."""

    worker: int
    step: Step
    start_s: float
    end_s: float


def simulate(plan: Plan, stages: Sequence[Stage], rate_bytes_s: float) -> List[Computed]:
    """Computes `plan` over links of `rate_bytes_s`; returns its steps by their ends."""
    return _Pipeline(plan, stages, rate_bytes_s).run()


class _Pipeline:
    def __init__(self, plan: Plan, stages: Sequence[Stage], rate_bytes_s: float) -> None:
        self._plan = plan
        self._stages = stages
        self._rate_bytes_s = rate_bytes_s
        self._unit = 0
        self._steps_left = Counter(step.unit for steps in plan for step in steps)
        self._next = [0] * len(plan)
        self._busy = [False] * len(plan)
        self._up_free_s = [0.0] * len(plan)
        self._down_free_s = [0.0] * len(plan)
        self._ready: Set[Pass] = set()
        """Passes whose output is where it is needed."""
        self._computed: List[Computed] = []
        self._heap: List[Tuple[float, int, Callable[..., None], Tuple[Any, ...]]] = []
        self._sequence = 0

    def run(self) -> List[Computed]:
        self._advance_all(0.0)
        while self._heap:
            now_s, _, handle, arguments = heapq.heappop(self._heap)
            handle(now_s, *arguments)
        assert not +self._steps_left, "a plan whose steps wait for each other"
        return self._computed

    def _at(self, time_s: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, handle, arguments))

    def _advance_all(self, now_s: float) -> None:
        for worker in range(len(self._plan)):
            self._advance(now_s, worker)

    def _advance(self, now_s: float, worker: int) -> None:
        """Starts the worker's next step if it may begin."""
        if self._busy[worker] or self._next[worker] == len(self._plan[worker]):
            return
        step = self._plan[worker][self._next[worker]]
        source = input_of(step.kind, worker, step.batch, len(self._plan))
        if step.unit > self._unit or not (source is None or source in self._ready):
            return
        self._busy[worker] = True
        self._next[worker] += 1
        stage = self._stages[worker]
        seconds = stage.forward_s if step.kind == FORWARD else stage.backward_s
        self._at(now_s + seconds, self._ends, Computed(worker, step, now_s, now_s + seconds))

    def _ends(self, now_s: float, done: Computed) -> None:
        self._computed.append(done)
        worker, step = done.worker, done.step
        self._busy[worker] = False
        receiver = worker + 1 if step.kind == FORWARD else worker - 1
        output: Pass = (step.kind, worker, step.batch)
        if receiver == len(self._plan):
            self._ready.add(output)  # the worker itself needs it
        elif receiver >= 0:
            start_s = max(now_s, self._up_free_s[worker])
            size_bytes = self._stages[min(worker, receiver)].activation_bytes
            seconds = size_bytes / self._rate_bytes_s
            self._up_free_s[worker] = start_s + seconds
            self._at(start_s, self._leaves, receiver, seconds, output)
        self._steps_left[step.unit] -= 1
        if self._steps_left[step.unit]:
            self._advance(now_s, worker)
            return
        self._unit += 1
        self._advance_all(now_s)

    def _leaves(self, now_s: float, receiver: int, seconds: float, output: Pass) -> None:
        start_s = max(now_s, self._down_free_s[receiver])
        self._down_free_s[receiver] = start_s + seconds
        self._at(start_s + seconds, self._arrives, receiver, output)

    def _arrives(self, now_s: float, receiver: int, output: Pass) -> None:
        self._ready.add(output)
        self._advance(now_s, receiver)


def batch_s(plan: Plan, stages: Sequence[Stage], rate_bytes_s: float) -> float:
    """The time between two batches, while as many enter the pipeline as leave it.

    `plan` should have 14 batches for each worker: those of the first four wait for links to fill,
    and those of the last two find no more batches behind them. It is the slowest worker's time:
    others may still catch up with it.
    """
    workers = len(plan)
    ends_s: List[List[float]] = [[] for _ in plan]
    for done in simulate(plan, stages, rate_bytes_s):
        if done.step.kind == BACKWARD:
            ends_s[done.worker].append(done.end_s)
    first, last = 4 * workers, 12 * workers
    return max((ends[last] - ends[first]) / (last - first) for ends in ends_s)
