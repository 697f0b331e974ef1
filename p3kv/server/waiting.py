"""Waits on this server: pulls for values, and rounds for pushes that have not come."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Set

from p3kv.server.engine import Engine, Unit
from p3kv.server.stalls import Wait
from p3kv.server.workers import Workers
from p3kv.wire.fields import PullHeader
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import workers

_SAME_STEPS = (
    "All workers must make the same number of steps: give each the same number of batches, or set "
    "P3KV_LET_WORKERS_LEAVE=1 on all to have the others go on."
)
_NEEDS_RANK_0 = (
    "Worker 0 must stay for each key's first round, while gradients are clipped by their norm, and "
    "with an optimizer whose updates leave numbers for the next key: give it the most batches."
)


class Pull(NamedTuple):
    """A worker's request for a value, and since when it waits, on the monotonic clock."""

    request: PullHeader
    answer: Callable[[], None]
    since_s: float


class Waiting:
    """Answers each pull when the value is new enough. Finds the rounds and pulls that wait for a
    worker, and ends the job if it has left.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        workers_may_leave: bool,
    ) -> None:
        """`workers_may_leave`: rounds go on without workers that have left, where they can."""
        self._engine = engine
        self._workers = workers
        self.workers_may_leave = workers_may_leave
        self.pulls: Dict[Unit, List[Pull]] = {}
        """Requests for values that are not new enough yet."""

    def pull(self, unit: Unit, request: PullHeader, answer: Callable[[], None]) -> None:
        """Has `answer` be called: now, or when a round has ended that the request waits for. Call
        `check_initial_values` afterwards."""
        self._answer_or_keep(unit, Pull(request, answer, time.monotonic()))

    def answer_pulls(self, unit: Unit) -> None:
        """To be called when a unit has another value."""
        for pull in self.pulls.pop(unit, ()):
            self._answer_or_keep(unit, pull)

    def _answer_or_keep(self, unit: Unit, pull: Pull) -> None:
        if unit.ledger.is_new_enough(pull.request.rank, pull.request.round):
            pull.answer()
        else:
            self.pulls.setdefault(unit, []).append(pull)

    def longer_than(self, least_s: float, now_s: float) -> Iterator[Wait]:
        """Rounds that have waited for a worker's push for so long, the longest first; of each key
        those with the lowest number.

        A later round may be open for longer, where a worker has pushed for it and not for the one
        before. The others can't have pushed for it, and are not to blame.
        """
        latest_s = now_s - least_s
        order = itertools.count()
        found = [(one.since_s, next(order), one) for one in self._initial_waits()]
        heapq.heapify(found)
        seen: Set[int] = set()
        for current, key_id in self._engine.rules.open_rounds.items():
            if current.since_s > latest_s:
                break
            while found and found[0][0] <= current.since_s:
                yield heapq.heappop(found)[-1]
            if key_id not in seen:
                seen.add(key_id)
                for wait in _oldest_waits(self._engine.keys[key_id].units):
                    heapq.heappush(found, (wait.since_s, next(order), wait))
        while found and found[0][0] <= latest_s:
            yield heapq.heappop(found)[-1]

    def check_all(self) -> None:
        """Ends the job if anything waits for a worker that has left."""
        for unit in self._engine.units():
            if self.check(unit):
                return
        self.check_initial_values()

    def check(self, unit: Unit) -> bool:
        """Ends the job, and returns True, if a round of `unit` waits for a worker that has left."""
        for number, current, missing in unit.ledger.waits():
            for rank in missing:
                if self._workers.departed(rank):
                    self._workers.suspect(
                        rank,
                        f"it ended in order, but {workers(current.arrived)} "
                        f"went on to round {number} of {unit.plan.called}",
                        _NEEDS_RANK_0 if self.workers_may_leave else _SAME_STEPS,
                    )
                    return True
        return False

    def check_initial_values(self) -> None:
        """Ends the job if a worker waits for an initial value, and worker rank 0 has left."""
        if self._workers.departed(0):
            for wait in self._initial_waits():
                self._workers.suspect(
                    0,
                    f"it ended in order, and {wait.unit.plan.called} has no initial value for "
                    f"{workers(wait.arrived)}",
                    "Worker 0 gives all initial values: all workers must train the same "
                    "parameters.",
                )
                return

    def _initial_waits(self) -> Iterator[Wait]:
        """Units that have no value at all, for which workers have asked."""
        for unit, pulls in self.pulls.items():
            # Slices of a later size have no value before their first round, and wait for others.
            if unit.round < INITIAL_ROUND and unit.first_round == INITIAL_ROUND:
                ranks = sorted({pull.request.rank for pull in pulls})
                since_s = min(pull.since_s for pull in pulls)
                yield Wait(unit, INITIAL_ROUND, [0], ranks, since_s)


def _oldest_waits(units: Iterable[Unit]) -> List[Wait]:
    """A key's rounds that wait for workers and have the lowest number of these."""
    waits = [
        Wait(unit, number, missing, list(current.arrived), current.since_s, unit.ledger.patience_s)
        for unit in units
        for number, current, missing in unit.ledger.waits()
        if missing
    ]
    oldest = min((wait.round for wait in waits), default=INITIAL_ROUND)
    return [wait for wait in waits if wait.round == oldest]
