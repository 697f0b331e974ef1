"""What waits on this server for pushes that have not come."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Tuple, Union

from p3kv.server.aggregation import Aggregator
from p3kv.server.keys import ServerKey
from p3kv.server.rows import RowsKey, RowsRound
from p3kv.server.rows_traffic import RowsTraffic
from p3kv.server.slice_states import Round, SliceState
from p3kv.server.stalls import Wait
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.header import INITIAL_ROUND, Header
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
    request: Header
    since_s: float


Pulls = Dict[SliceState, List[Pull]]
"""Requests that wait for a value that is new enough."""
_State = Union[SliceState, RowsKey]


class _InitialWait(NamedTuple):
    """Workers that wait for a key's initial value, and since when, on the monotonic clock."""

    state: _State
    ranks: List[int]
    since_s: float


class Waiting:
    """Finds the rounds and pulls that wait for a worker, and ends the job if it has left.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        keys: Mapping[int, ServerKey],
        rows: RowsTraffic,
        pulls: Pulls,
        aggregator: Aggregator,
        workers: Workers,
        departed: Callable[[int], bool],
    ) -> None:
        """`departed(rank)`: whether no more push of a worker comes."""
        self._keys = keys
        self._rows = rows
        self._pulls = pulls
        self._aggregator = aggregator
        self._workers = workers
        self._departed = departed
        self.workers_may_leave = False
        """Whether rounds go on without workers that have left, where they can."""

    def longer_than(self, least_s: float, now_s: float) -> Iterator[Wait]:
        """Rounds that have waited for a worker's push for so long; of each key the oldest one.

        A later round may be open for longer, where a worker has pushed for it and not for the one
        before. The others can't have pushed for it, and are not to blame.
        """
        for states in self._states_by_key():
            waits = [
                Wait(state, round_, missing, list(current.arrived), current.since_s)
                for state in states
                for round_, current, missing in self._missing(state)
                if missing
            ]
            oldest = min((wait.round for wait in waits), default=INITIAL_ROUND)
            for wait in waits:
                if wait.round == oldest and now_s - wait.since_s >= least_s:
                    yield wait
        for initial in self._initial_waits():
            if now_s - initial.since_s >= least_s:
                yield Wait(initial.state, INITIAL_ROUND, [0], initial.ranks, initial.since_s)

    def check_all(self) -> None:
        """Ends the job if anything waits for a worker that has left."""
        for state in self.states():
            if self.check(state):
                return
        self.check_initial_values()

    def check(self, state: _State) -> bool:
        """Ends the job, and returns True, if a round of `state` waits for a worker that has
        left."""
        for round_, current, missing in self._missing(state):
            for rank in missing:
                if self._departed(rank):
                    self._workers.suspect(
                        rank,
                        f"it ended in order, but {workers(current.arrived)} "
                        f"went on to round {round_} of {state.called}",
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
                    f"it ended in order, and {wait.state.called} has no initial value for "
                    f"{workers(wait.ranks)}",
                    "Worker 0 gives all initial values: have it initialise every key.",
                )
                return

    def states(self) -> Iterator[_State]:
        """Everything that has rounds of its own."""
        yield from (state for states in self._states_by_key() for state in states)

    def _states_by_key(self) -> Iterator[Iterable[_State]]:
        yield from (key.all_states() for key in self._keys.values())
        yield from ([key] for key in self._rows.keys.values())

    def _initial_waits(self) -> Iterator[_InitialWait]:
        asked: List[Tuple[_State, List[Tuple[int, float]]]] = [
            (state, [(pull.request.rank, pull.since_s) for pull in pulls])
            for state, pulls in self._pulls.items()
            # Slices of a later size have no value before their first round, and wait for others.
            if state.round < INITIAL_ROUND and state.first_round == INITIAL_ROUND
        ]
        for key in self._rows.keys.values():
            pulls = self._rows.waits_for_initial(key)
            asked.append((key, [(pull.request.rank, pull.since_s) for pull in pulls]))
        for state, since in asked:
            if since:
                ranks = sorted({rank for rank, _ in since})
                yield _InitialWait(state, ranks, min(since_s for _, since_s in since))

    def _missing(self, state: _State) -> Iterator[Tuple[int, Union[Round, RowsRound], List[int]]]:
        return state.waits() if isinstance(state, RowsKey) else self._aggregator.waits(state)
