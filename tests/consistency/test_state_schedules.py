"""Optimizer states saved and loaded in any order of events, while slices change size."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from random import Random
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import P3Error, ProtocolError
from p3kv.server.optimizer import State
from p3kv.wire.fields import RoundHeader, StateHeader
from p3kv.wire.header import INITIAL_ROUND, MAX_STATE_BYTES, Kind
from p3kv.wire.messages import DeclaredKey, SliceSizes, StateOutline
from p3kv.wire.states import ArrivingState, PlainState
from tests.adding import Adding
from tests.consistency.test_schedules import SIZE, Moods, gradient
from tests.handling import take
from tests.in_memory import Event, MemoryJob, Worker

ROUNDS = 8


class Remembering(Adding):
    """Remembers the sum of all gradients, and how many updates there were."""

    def __init__(self) -> None:
        self._states: Dict[Tuple[int, int], State] = {}

    def update(
        self, layout: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        super().update(layout, index, weight, total, step)
        before = self._states.get((layout.key_id, index))
        if before is None:
            before = State({"sum": np.zeros_like(total)}, {"updates": 0})
        self._states[layout.key_id, index] = State(
            {"sum": before.elements["sum"] + total}, {"updates": before.numbers["updates"] + 1}
        )

    def export(self, layout: DeclaredKey, index: int) -> Optional[State]:  # type: ignore[override]
        return self._states.pop((layout.key_id, index), None)

    def load(self, layout: DeclaredKey, index: int, state: State) -> None:
        assert (layout.key_id, index) not in self._states
        copied = {name: array.copy() for name, array in state.elements.items()}
        self._states[layout.key_id, index] = State(copied, state.numbers)


class Script:
    """One worker's pushes; between them it saves, and all load at the same time."""

    def __init__(self, rank: int, worker: Worker, key: Any, random: Random, loads: int) -> None:
        self.rank = rank
        self._worker = worker
        self._key = key
        self._random = random
        self._loads_after = loads
        self.loaded_after: Optional[int] = None
        self.round = INITIAL_ROUND
        self.waits = False
        """For the others, to load what it has at this round."""
        self._answer: Optional[Future] = None

    @property
    def busy(self) -> bool:
        return bool(self._worker.under_way or self._answer is not None)

    def go_on(self) -> None:
        if self.round == self._loads_after and self.loaded_after is None:
            self.waits = True
        elif self._random.random() < 0.4:
            self._answer = Future()
            self._worker.data_plane.states.ask(self._answer, self._key, self.round, False)
            self._answer.add_done_callback(self._check)
        else:
            self.push(self.round + 1)

    def push(self, round_: int) -> None:
        self.round = round_
        target = np.zeros(SIZE, np.float32) if self._random.random() < 0.5 else None
        self._worker.call(self._key, round_, gradient(self.rank, round_), target)

    def loaded(self) -> None:
        self.loaded_after, self.waits = self.round, False

    def give(self, value: np.ndarray, done: Future) -> None:
        """Gives the servers the sums `value` after 100 updates."""
        lengths = [length for _, length in self._key.runs]
        parts = State({"sum": value}, {"updates": 100}).cut(lengths)
        self._worker.data_plane.states.give(
            done,
            self._key,
            self.round,
            False,
            {
                server: PlainState(part.elements, part.numbers)
                for (server, _), part in zip(self._key.runs, parts)
            },
        )

    def _check(self, answer: Future) -> None:
        self._answer = None
        parts = [answer.result()[server] for server, _ in self._key.runs]
        since, updates, total = 0, 0, np.zeros(SIZE, np.float32)
        if self.loaded_after is not None:
            since, updates, total = self.loaded_after, 100, given_sums()
        if self.round == since == 0:
            assert parts == [None] * len(parts)
            return
        for round_ in range(since + 1, self.round + 1):
            total = total + sum(gradient(rank, round_) for rank in range(WORKERS))
        joined = State.joined([State(part.elements, part.numbers) for part in parts])
        np.testing.assert_array_equal(joined.elements["sum"], total)
        assert joined.numbers == {"updates": updates + self.round - since}


WORKERS = 2


def given_sums() -> np.ndarray:
    return np.arange(SIZE, dtype=np.float32)


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_states_are_those_of_the_round_while_sizes_change(seed: int, servers: int) -> None:
    random = Random(seed)
    with closing(MemoryJob(WORKERS, servers, SIZE // 2)) as job:
        for server in job.servers:
            server.consumer.set_optimizer(0, Remembering())
        loads = random.randint(0, ROUNDS - 1)
        keys = job.declare("w", SIZE)
        scripts = [
            Script(rank, worker, keys[rank], random, loads)
            for rank, worker in enumerate(job.workers)
        ]
        job.workers[0].call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        given: Optional[Future] = None
        while True:
            free = [
                script
                for script in scripts
                if not script.busy and not script.waits and script.round < ROUNDS
            ]
            events: List[Event] = [*job.events(), *((script.go_on,) for script in free)]
            if given is None and all(script.waits for script in scripts):
                given = Future()
                given.add_done_callback(lambda _: [script.loaded() for script in scripts])
                scripts[0].give(given_sums(), given)
                continue
            if not events:
                break
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        assert not any(worker.failures for worker in job.workers)
        assert [script.round for script in scripts] == [ROUNDS] * WORKERS
        assert not any(script.busy for script in scripts)
        assert scripts[0].loaded_after == loads
        assert not any(server.consumer.states.waiting for server in job.servers)


def outlined(*arrays: Tuple[str, str, List[int]]) -> StateOutline:
    return StateOutline({}, list(arrays))


def test_bytes_land_in_the_arrays_in_their_order() -> None:
    arriving = ArrivingState(outlined(("a", "float32", [2, 2]), ("b", "int8", [0]),
                                      ("c", "float16", [3])), 4, False)  # fmt: skip
    a, c = np.arange(4, dtype=np.float32).reshape(2, 2), np.arange(3, dtype=np.float16)
    for piece in (a.tobytes()[:6], a.tobytes()[6:], c.tobytes()):
        assert not arriving.complete
        arriving.land(of_bytes(len(piece)))[:] = piece
    assert arriving.complete
    state = arriving.state
    assert state is not None
    np.testing.assert_array_equal(state.elements["a"], a)
    np.testing.assert_array_equal(state.elements["c"], c)
    assert state.elements["b"].shape == (0,)


def of_bytes(count: int) -> RoundHeader:
    return RoundHeader(Kind.STATE_BYTES, 0, payload_bytes=count, round=1)


@pytest.mark.parametrize("count", [0, 17, MAX_STATE_BYTES])
def test_bytes_that_no_array_has_room_for_are_refused(count: int) -> None:
    arriving = ArrivingState(outlined(("a", "float32", [4])), 4, False)
    with pytest.raises(ProtocolError, match=f"{count} bytes"):
        arriving.land(of_bytes(count))


@pytest.mark.parametrize("shape", [[5], [2, 3], [2**36]])
def test_an_array_that_is_too_large_takes_no_memory(shape: List[int]) -> None:
    with pytest.raises(ProtocolError, match="at most 4 elements"):
        ArrivingState(outlined(("a", "float32", shape)), 4, False)


def test_an_array_of_a_whole_tensor_may_have_more_elements_than_the_key() -> None:
    arriving = ArrivingState(outlined(("a", "float32", [2, 3])), 4, True)
    arriving.land(of_bytes(24))
    with pytest.raises(ProtocolError, match="at most"):
        ArrivingState(outlined(("a", "float32", [2**40])), 4, True)


def test_frames_of_states_that_nobody_waits_for_are_refused() -> None:
    with closing(MemoryJob(1, 1, SIZE)) as job:
        (worker,), (server,) = job.workers, job.servers
        (key,) = job.declare("w", SIZE)
        for kind in (Kind.STATE, Kind.STATE_BYTES, Kind.LOADED):
            header = kind.header(kind, 0, payload_bytes=1, key=key.key_id)
            with pytest.raises(ProtocolError):
                take(worker.data_plane, worker.servers[0], header, outlined())
        connection = server.connections[0]
        with pytest.raises(ProtocolError, match="not announced"):
            take(connection.handler, connection, of_bytes(1))
        for kind in (Kind.STATES, Kind.STATE):
            header = StateHeader(kind, 0, payload_bytes=1, key=7)
            with pytest.raises(ProtocolError, match="unknown here"):
                take(connection.handler, connection, header, outlined())
        with pytest.raises(ProtocolError, match="round 9"):
            take(connection.handler, connection, StateHeader(Kind.STATES, 0, round=9))
        early = StateHeader(Kind.STATES, 0, round=1)
        take(connection.handler, connection, early)
        with pytest.raises(ProtocolError, match="before it had the last one"):
            take(connection.handler, connection, early)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [([SIZE - 1], "of shape .* for a state of 12000 elements"), ([SIZE, 2], "at most 12000")],
)
def test_a_state_that_does_not_fit_the_key_ends_its_connection(
    shape: List[int], reason: str
) -> None:
    with closing(MemoryJob(1, 1, SIZE)) as job:
        (worker,), (key,) = job.workers, job.declare("w", SIZE)
        worker.call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.finish()
        state = PlainState({"sum": np.zeros(shape, np.float32)}, {})
        worker.data_plane.states.give(Future(), key, INITIAL_ROUND, False, {0: state})
        with pytest.raises(P3Error, match=reason):
            job.finish()
