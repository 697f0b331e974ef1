"""Waits on this server for pushes that have not come."""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

from p3kv.server.engine import Engine, RowsKey, ServerSlice, Unit
from p3kv.server.rows_consumer import RowsConsumer
from p3kv.server.stalls import Wait
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
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
    """A worker's request for values, and since when it waits, on the monotonic clock."""

    connection: Connection
    request: PullHeader
    since_s: float


Pulls = Dict[ServerSlice, List[Pull]]
"""Requests that wait for a value that is new enough."""


class _InitialWait(NamedTuple):
    """Workers that wait for a key's initial value, and since when, on the monotonic clock."""

    unit: Unit
    ranks: List[int]
    since_s: float


class Waiting:
    """Finds the rounds and pulls that wait for a worker, and ends the job if it has left.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        engine: Engine,
        rows: RowsConsumer,
        pulls: Pulls,
        workers: Workers,
        departed: Callable[[int], bool],
    ) -> None:
        """`departed(rank)`: whether no more push of a worker comes."""
        self._engine = engine
        self._rows = rows
        self._pulls = pulls
        self._workers = workers
        self._departed = departed
        self.workers_may_leave = False
        """Whether rounds go on without workers that have left, where they can."""

    def longer_than(self, least_s: float, now_s: float) -> Iterator[Wait]:
        """Rounds that have waited for a worker's push for so long; of each key the oldest one.

        A later round may be open for longer, where a worker has pushed for it and not for the one
        before. The others can't have pushed for it, and are not to blame.
        """
        for key in self._engine.keys.values():
            waits = [
                Wait(unit, number, missing, list(current.arrived), current.since_s)
                for unit in key.units
                for number, current, missing in unit.ledger.waits()
                if missing
            ]
            oldest = min((wait.round for wait in waits), default=INITIAL_ROUND)
            for wait in waits:
                if wait.round == oldest and now_s - wait.since_s >= least_s:
                    yield wait
        for initial in self._initial_waits():
            if now_s - initial.since_s >= least_s:
                yield Wait(initial.unit, INITIAL_ROUND, [0], initial.ranks, initial.since_s)

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
                if self._departed(rank):
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
        if self._departed(0):
            for wait in self._initial_waits():
                self._workers.suspect(
                    0,
                    f"it ended in order, and {wait.unit.plan.called} has no initial value for "
                    f"{workers(wait.ranks)}",
                    "Worker 0 gives all initial values: have it initialise every key.",
                )
                return

    def _initial_waits(self) -> Iterator[_InitialWait]:
        asked: List[Tuple[Unit, List[Tuple[int, float]]]] = [
            (slice_, [(pull.request.rank, pull.since_s) for pull in pulls])
            for slice_, pulls in self._pulls.items()
            # Slices of a later size have no value before their first round, and wait for others.
            if slice_.round < INITIAL_ROUND and slice_.first_round == INITIAL_ROUND
        ]
        for key in self._engine.keys.values():
            if isinstance(key, RowsKey):
                pulls = self._rows.waits_for_initial(key)
                asked.append((key, [(pull.request.rank, pull.since_s) for pull in pulls]))
        for unit, since in asked:
            if since:
                ranks = sorted({rank for rank, _ in since})
                yield _InitialWait(unit, ranks, min(since_s for _, since_s in since))
