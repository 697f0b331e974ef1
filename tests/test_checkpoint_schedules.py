"""Whatever the order of events, and while slices change size: a checkpoint is of one moment."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from typing import List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.checkpoints import newest
from p3kv.errors import ProtocolError
from p3kv.wire.fields import Header
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.wire.messages import UNKNOWN, Checkpoint, Resumed, ResumedStore, StoreAtCut, Terms, encode
from p3kv.worker.cuts import Cut, Cuts
from tests.in_memory import Event, Job
from tests.test_schedules import SELDOM, SIZE, Moods, gradient, values
from tests.test_state_schedules import Remembering

STEPS, WORKERS = 8, 2


class Script:
    """One worker's pushes of a key in every step, and of another in one of three."""

    def __init__(self, job: Job, rank: int, often: List, seldom: List, cuts: List[int]) -> None:
        self.worker = job.workers[rank]
        self.keys = often[rank], seldom[rank]
        self.rank = rank
        self.step = 0
        self._cuts = cuts

    def go_on(self) -> None:
        if self.rank == 0 and self.step in self._cuts:
            rounds = [(key.key_id, self.rounds(self.step)[i]) for i, key in enumerate(self.keys)]
            names = {self.keys[0].key_id: "what rank 0 calls it"}
            stores = [StoreAtCut(ResumedStore(0, self.step, {}), False, rounds, names)]
            self.worker.traffic.checkpoints.add(Cut(self.step, self.step, stores))
        self.step += 1
        for key, now, before in zip(self.keys, self.rounds(self.step), self.rounds(self.step - 1)):
            if now > before:
                self.worker.call(key, now, gradient(self.rank, now), None)

    @staticmethod
    def rounds(step: int) -> Tuple[int, int]:
        return step, step // SELDOM


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_checkpoint_has_each_key_s_round_of_one_step(
    tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int
) -> None:
    random = Random(seed)
    folder = tmp_path_factory.mktemp("checkpoints")
    with closing(Job(WORKERS, servers, SIZE // 2)) as job:
        for server in job.servers:
            server.consumer.set_optimizer(0, Remembering())
            server.consumer.checkpoints.hosts = ["here"] * servers
            server.consumer.checkpoints.write_to(str(folder))
        often, seldom = job.declare("often", SIZE), job.declare("seldom", SIZE)
        for key in (often[0], seldom[0]):
            job.workers[0].call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        cuts = sorted(random.sample(range(1, STEPS), 2))
        scripts = [Script(job, rank, often, seldom, cuts) for rank in range(WORKERS)]
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        while True:
            events: List[Event] = [
                *job.events(ahead=3), *((one.go_on,) for one in scripts if one.step < STEPS)
            ]  # fmt: skip
            if not events:
                break
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(Terms(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        assert not any(worker.failures for worker in job.workers)
        for server in job.servers:
            assert server.consumer.checkpoints.open is None
            server.consumer.checkpoints.close()
        job.finish()
    saved = newest(str(folder), "here")
    assert saved is not None
    # The second is left out if the first is still being written.
    assert saved.step in cuts
    for name, round_ in zip(("often", "seldom"), Script.rounds(saved.step)):
        of_key = saved.key(0, name)
        assert of_key.outline.name == ("what rank 0 calls it" if name == "often" else None)
        np.testing.assert_array_equal(of_key.value, values(WORKERS, round_)[round_])
        assert [state.numbers["updates"] for state in of_key.states] == [round_] * len(
            of_key.states
        )
        if round_:
            total = np.concatenate([state.elements["sum"] for state in of_key.states])
            np.testing.assert_array_equal(total, of_key.value - 1)


def asked(*rounds: Tuple[int, int]) -> Checkpoint:
    return Checkpoint(1, "one", UNKNOWN, [StoreAtCut(ResumedStore(0, 1, {}), False, list(rounds))])


def test_a_checkpoint_that_can_not_be_right_is_refused(tmp_path: Path) -> None:
    with closing(Job(1, 1, SIZE)) as job:
        (worker,), (server,) = job.workers, job.servers
        (key,) = job.declare("w", SIZE)
        for round_ in (0, 1, 2):
            worker.call(key, round_, np.ones(SIZE, np.float32), None)
        job.finish()

        def ask(checkpoint: Checkpoint) -> None:
            words = encode(checkpoint)
            header = Header(Kind.CHECKPOINT, 0, payload_bytes=len(words))
            landing = server.traffic.land(server.connections[0], header)
            assert landing.memory is not None
            landing.memory[:] = words
            landing.arrived()

        with pytest.raises(ProtocolError, match="in a job that has none"):
            ask(asked((0, 2)))
        server.consumer.checkpoints.hosts = ["here"]
        server.consumer.checkpoints.write_to(str(tmp_path))
        with pytest.raises(ProtocolError, match="round 1 of key 'w', which has ended a later one"):
            ask(asked((0, 1)))
        with pytest.raises(ProtocolError, match="before it had the last one"):
            ask(asked((0, 2)))


def cut_steps(every: int, *steps: int, resumed: Optional[Resumed] = None) -> List[Tuple[int, int]]:
    """Before which of these steps, each of a store, there is a checkpoint, and its number."""
    cuts = Cuts(every, lambda: resumed or Resumed(0, []))
    made = {store.store: store.steps for store in (resumed.stores if resumed else [])}
    expected = False
    found = []
    for position, store in enumerate(steps):
        due = cuts.due(store, made.get(store, 0))
        # What no gradient changes was copied at the end of the step before.
        assert due is None or expected
        expected = cuts.may_be_due()
        made[store] = made.get(store, 0) + 1
        if due is not None:
            found.append((position, due))
    return found


def test_every_so_many_steps_there_is_a_checkpoint() -> None:
    assert cut_steps(2, *[0] * 6) == [(2, 2), (4, 4)]
    resumed = Resumed(4, [ResumedStore(0, 4, {})])
    assert cut_steps(2, *[0] * 6, resumed=resumed) == [(2, 6), (4, 8)]


def test_stores_that_take_turns_have_made_the_same_number_of_iterations() -> None:
    assert cut_steps(2, *[1, 0] * 5) == [(4, 4), (8, 8)]
    # Two steps of one store for each of the other.
    assert cut_steps(4, *[0, 0, 1] * 5) == [(6, 6), (12, 12)]


@given(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=40))
def test_before_a_checkpoint_it_is_known_that_there_may_be_one(
    every: int, steps: List[int]
) -> None:
    cut_steps(every, *steps)


def test_when_one_store_has_ended_another_leads() -> None:
    assert cut_steps(2, *[0] * 3, *[1] * 6) == [(2, 2), (5, 5), (7, 7)]
