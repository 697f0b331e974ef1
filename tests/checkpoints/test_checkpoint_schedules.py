"""Whatever the order of events, and while slices change size: a checkpoint is of one moment."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Callable, Iterable, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import own_codec  # noqa: F401  registers int8
from p3kv.checkpoints import WORKER, Part, WorkersPart, newest
from p3kv.common.registry import Choice
from p3kv.errors import CheckpointError, ProtocolError
from p3kv.wire.fields import Header
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.wire.messages import (
    UNKNOWN,
    Checkpoint,
    CodecChoices,
    Resumed,
    ResumedStore,
    SliceSizes,
    StoreAtCut,
)
from p3kv.worker.saving.cuts import Cut, Cuts
from p3kv.worker.transfers import WorkerKey
from tests.consistency.test_schedules import SELDOM, SIZE, Moods, gradient, values
from tests.consistency.test_state_schedules import Remembering
from tests.handling import take
from tests.in_memory import Event, MemoryJob

STEPS, WORKERS = 8, 2


class Script:
    """One worker's pushes of a key in every step, and of another in one of three."""

    def __init__(
        self, job: MemoryJob, rank: int, often: List, seldom: List, cuts: List[int]
    ) -> None:
        self.worker = job.workers[rank]
        self.keys = often[rank], seldom[rank]
        self.rank = rank
        self.step = 0
        self._cuts = cuts

    def go_on(self) -> None:
        remembers = self.worker.data_plane.checkpoints.own.has_part
        if self.step in self._cuts and (self.rank == 0 or remembers):
            rounds = [(key.key_id, self.rounds(self.step)[i]) for i, key in enumerate(self.keys)]
            names = {self.keys[0].key_id: "what rank 0 calls it"}
            stores = [StoreAtCut(ResumedStore(0, self.step, {}), False, rounds, names)]
            self.worker.data_plane.checkpoints.add(Cut(self.step, self.step, stores))
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
    with closing(MemoryJob(WORKERS, servers, SIZE // 2)) as job:
        for server in job.servers:
            server.consumer.set_optimizer(0, Remembering())
            server.consumer.checkpoints._folder = str(folder)
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
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        assert not any(worker.failures for worker in job.workers)
        for server in job.servers:
            assert not server.consumer.checkpoints.waits_for_rounds
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


def gradients(codec: str) -> CodecChoices:
    return CodecChoices(gradients=Choice(codec))


TWO_BITS = CodecChoices(gradients=Choice("2bit", {"threshold": 3.0}))


def residual(rank: int, rounds: int) -> np.ndarray:
    """What a worker has not sent after so many rounds, with 2 bits and a threshold of 3."""
    kept = np.zeros(SIZE, np.float32)
    for round_ in range(1, rounds + 1):
        kept += gradient(rank, round_)
        kept -= np.where(kept >= 3, 3, 0)
    return kept


def remembered(folder: Path, step: int, rank: int, name: str) -> np.ndarray:
    """What a worker's part of a checkpoint has of what its codec remembered."""
    saved = newest(str(folder), "here")
    assert saved is not None and saved.step == step
    part = Part(step, rank, WORKERS, WORKER)
    found = WorkersPart(str(folder), part, saved.identity).memory(0, name)
    assert found is not None and found.codec == "2bit"
    return found.arrays["residual"]


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_checkpoint_has_what_each_worker_s_codec_remembers_after_the_same_step(
    tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int
) -> None:
    random = Random(seed)
    folder = tmp_path_factory.mktemp("checkpoints")
    with closing(
        MemoryJob(WORKERS, servers, SIZE // 2, codecs=TWO_BITS, checkpoints=str(folder))
    ) as job:
        often, seldom = job.declare("often", SIZE), job.declare("seldom", SIZE)
        for key in (often[0], seldom[0]):
            job.workers[0].call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        cuts = sorted(random.sample(range(1, STEPS), 2))
        scripts = [Script(job, rank, often, seldom, cuts) for rank in range(WORKERS)]
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        while events := [
            *job.events(ahead=3), *((one.go_on,) for one in scripts if one.step < STEPS)
        ]:  # fmt: skip
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        checkpoints = job.workers[0].data_plane.checkpoints
        until(job, lambda: not checkpoints._waits_for)
        assert not any(worker.failures for worker in job.workers)
        # The second is left out if the first is still being written.
        step = checkpoints._complete[-1]
    assert step in cuts
    for rank in range(WORKERS):
        for name, round_ in zip(("often", "seldom"), Script.rounds(step)):
            np.testing.assert_array_equal(
                remembered(folder, step, rank, name), residual(rank, round_)
            )
    with closing(
        MemoryJob(
            WORKERS, 4 - servers, SIZE // 7, codecs=TWO_BITS, checkpoints=str(folder), resumes=True
        )
    ) as job:
        for rank, key in enumerate(job.declare("often", SIZE)):
            assert key.memory is not None
            np.testing.assert_array_equal(key.memory.memory()["residual"], residual(rank, step))


def until(job: MemoryJob, done: Callable[[], bool]) -> None:
    """Has everything happen until `done()`, also what threads ask for."""
    deadline = time.monotonic() + 20
    while not done():
        job.finish()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def begin_two_steps(
    job: MemoryJob, keys: List[WorkerKey], first: int = 1, ranks: Iterable[int] = range(WORKERS)
) -> None:
    """Has workers push for two rounds, with a checkpoint between, before anything is sent."""
    if first == 1:
        job.workers[0].call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.workers[0].begin()
        job.finish()
    for rank in ranks:
        worker, key = job.workers[rank], keys[rank]
        for round_ in (first, first + 1):
            worker.call(key, round_, gradient(rank, round_), None)
            worker.begin()
            if round_ == first:
                store = StoreAtCut(ResumedStore(0, 1, {}), False, [(key.key_id, round_)])
                worker.data_plane.checkpoints.add(Cut(round_, round_, [store]))


@pytest.mark.parametrize("per_host", [1, WORKERS])
def test_slices_of_the_round_that_are_encoded_after_the_cut_are_in_the_checkpoint(
    tmp_path: Path, per_host: int
) -> None:
    """Also of workers of one host, which sum only what no checkpoint needs of each."""
    folder = str(tmp_path)
    with closing(
        MemoryJob(WORKERS, 2, SIZE // 3, codecs=TWO_BITS, checkpoints=folder, per_host=per_host)
    ) as job:
        begin_two_steps(job, job.declare("w", SIZE))
        ((_, ((_, copy),)),) = job.workers[1].data_plane.checkpoints.own._copied
        assert copy.missing_elems == SIZE
        until(job, lambda: job.workers[0].data_plane.checkpoints._complete == [1])
    for rank in range(WORKERS):
        np.testing.assert_array_equal(remembered(tmp_path, 1, rank, "w"), residual(rank, 1))


def test_what_a_worker_can_not_write_is_told_to_worker_0_and_the_next_checkpoint_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(
        MemoryJob(WORKERS, 2, SIZE // 3, codecs=TWO_BITS, checkpoints=str(tmp_path))
    ) as job:
        blocked = tmp_path / (Part(1, 1, WORKERS, WORKER).name + ".unfinished")
        blocked.mkdir()
        keys = job.declare("w", SIZE)
        begin_two_steps(job, keys)
        checkpoints = job.workers[0].data_plane.checkpoints
        until(job, lambda: bool(checkpoints._problem) and not checkpoints._waits_for)
        assert f"worker 1 has not written {tmp_path / Part(1, 1, WORKERS, WORKER).name}: " in (
            caplog.text
        )
        with pytest.raises(CheckpointError, match="the part of worker 1"):
            newest(str(tmp_path), "elsewhere")
        begin_two_steps(job, keys, 3)
        until(job, lambda: checkpoints._complete == [3])
    np.testing.assert_array_equal(remembered(tmp_path, 3, 1, "w"), residual(1, 3))


def test_a_worker_that_has_pushed_something_else_before_the_step_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(MemoryJob(WORKERS, 1, SIZE, codecs=TWO_BITS, checkpoints=str(tmp_path))) as job:
        worker, keys = job.workers[0], job.declare("w", SIZE)
        worker.call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        for rank, pushed in enumerate((2, 1)):
            for round_ in (1, 2):
                job.workers[rank].call(keys[rank], round_, gradient(rank, round_), None)
            store = StoreAtCut(ResumedStore(0, 1, {}), False, [(keys[rank].key_id, pushed)])
            job.workers[rank].data_plane.checkpoints.add(Cut(2, 1, [store]))
        job.finish()
        for rank in range(WORKERS):
            job.workers[rank].call(keys[rank], 3, gradient(rank, 3), None)
        job.finish()
        until(job, lambda: not worker.data_plane.checkpoints._waits_for)
    part = Part(1, 1, WORKERS, WORKER).name
    said = f"{part}: the worker has pushed key 'w' 1 times before this step, and worker 0 2 times"
    assert said in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("2bit", "int8", "has what the codec '2bit' remembers of key 'w', which now has 'int8'"),
        (
            "2bit",
            "identity",
            "has what the codec '2bit' remembers of key 'w', which now has 'ident",
        ),
        ("identity", "2bit", "has nothing that the codec '2bit' remembers of key 'w'"),
        ("identity", "identity", ""),
        ("2bit", "2bit", ""),
    ],
)
def test_what_other_codecs_had_kept_back_is_said_to_be_lost(
    tmp_path: Path, before: str, after: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(
        MemoryJob(WORKERS, 1, SIZE, codecs=gradients(before), checkpoints=str(tmp_path))
    ) as job:
        begin_two_steps(job, job.declare("w", SIZE))
        until(job, lambda: job.workers[0].data_plane.checkpoints._complete == [1])
    caplog.clear()
    codecs = gradients(after)
    with closing(
        MemoryJob(WORKERS, 1, SIZE, codecs=codecs, checkpoints=str(tmp_path), resumes=True)
    ) as job:
        for key in (*job.declare("w", SIZE), *job.declare("new", SIZE)):
            assert key.memory is None or (key.memory.memory()["residual"] != 0).any() == (
                before == after and key.key == "w"
            )
    said = [one.getMessage() for one in caplog.records if "is lost once" in one.getMessage()]
    assert len(said) == bool(why)
    assert not why or said[0].startswith(f"the checkpoint of step 1 {why}")


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_worker_that_has_left_keeps_no_checkpoint_waiting(
    tmp_path: Path, asked_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(
        MemoryJob(WORKERS, 1, SIZE, codecs=TWO_BITS, lets_leave=True, checkpoints=str(tmp_path))
    ) as job:
        keys = job.declare("w", SIZE)
        if not asked_before:
            job.workers[1].leave()
            job.finish()
        begin_two_steps(job, keys, ranks=[0])
        job.finish()
        if asked_before:
            assert job.workers[1].data_plane.checkpoints.own._wanted is not None
            job.workers[1].leave()
        until(job, lambda: not job.workers[0].data_plane.checkpoints._waits_for)
    assert "worker 1 has not written its part: it has left the job" in caplog.text


def asked(*rounds: Tuple[int, int]) -> Checkpoint:
    return Checkpoint(1, "one", UNKNOWN, [StoreAtCut(ResumedStore(0, 1, {}), False, list(rounds))])


def test_a_checkpoint_that_can_not_be_right_is_refused(tmp_path: Path) -> None:
    with closing(MemoryJob(1, 1, SIZE)) as job:
        (worker,), (server,) = job.workers, job.servers
        (key,) = job.declare("w", SIZE)
        for round_ in (0, 1, 2):
            worker.call(key, round_, np.ones(SIZE, np.float32), None)
        job.finish()

        def ask(checkpoint: Checkpoint) -> None:
            connection = server.connections[0]
            take(connection.handler, connection, Header(Kind.CHECKPOINT, 0), checkpoint)

        with pytest.raises(ProtocolError, match="in a job that has none"):
            ask(asked((0, 2)))
        server.consumer.checkpoints._folder = str(tmp_path)
        with pytest.raises(ProtocolError, match="round 1 of key 'w', which has ended a later one"):
            ask(asked((0, 1)))
        with pytest.raises(ProtocolError, match="before it had the last one"):
            ask(asked((0, 2)))


class _Store:
    """Of which nobody asks anything here."""


def cut_steps(every: int, *steps: int, resumed: Optional[Resumed] = None) -> List[Tuple[int, int]]:
    """Before which of these steps, each of a store, there is a checkpoint, and its number."""
    cuts = Cuts(every)
    for _ in range(3):
        cuts.add(_Store(), True, resumed or Resumed(0, []))
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


@pytest.mark.parametrize("every", [1, 2])
def test_after_a_script_s_last_step_a_checkpoint_is_due_once(every: int) -> None:
    cuts = Cuts(every)
    cuts.add(_Store(), True, Resumed(0, []))
    for step in range(4):
        cuts.due(0, step)
    assert [cuts.due_at_end() for _ in range(2)] == [4, None]
