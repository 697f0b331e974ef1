"""Whatever the order of events, a checkpoint has the same rounds of all workers, where these are
each worker's own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.checkpoints import newest
from p3kv.errors import ProtocolError
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import CutReached, ResumedStore, StoreAtCut
from p3kv.worker.saving.cuts import Cut
from tests.consistency.test_schedules import SELDOM, SIZE, Moods, gradient, values
from tests.consistency.test_state_schedules import Remembering
from tests.frontends.test_torch import job as torch_job
from tests.in_memory import Event, MemoryJob
from tests.jobs import JobResult, run_job
from tests.torch_environment import NEEDS_TORCH

STEPS, WORKERS = 8, 3


def with_torch(*last: int, **more: Any) -> JobResult:
    return torch_job("torch_own_rounds.py", *last, workers=3, **more)


def with_the_other(*last: int, **more: Any) -> JobResult:
    return run_job("own_rounds.py", last, 3, **more)


class Script:
    """One worker's pushes of a key in every step, and of another in one of three; half of them
    wait for the value."""

    def __init__(self, job: MemoryJob, rank: int, keys: List, cuts: List[int], last: int) -> None:
        self.worker = job.workers[rank]
        self.keys = [key[rank] for key in keys]
        self.rank = rank
        self.step = 0
        self.last = last
        self._cuts = cuts

    def go_on(self) -> None:
        if self.step in self._cuts:
            rounds = [(key.key_id, at) for key, at in zip(self.keys, self.rounds(self.step))]
            known = ResumedStore(0, self.step, {})
            store = StoreAtCut(known, False, rounds, own_rounds=True)
            self.worker.data_plane.checkpoints.add(Cut(0, self.step, [store]))
        self.step += 1
        for key, now, before in zip(self.keys, self.rounds(self.step), self.rounds(self.step - 1)):
            if now > before:
                target = np.empty(SIZE, np.float32) if now % 2 else None
                self.worker.call(key, now, gradient(self.rank, now), target)

    @staticmethod
    def rounds(step: int) -> Tuple[int, int]:
        return step, step // SELDOM


@pytest.mark.parametrize("rule", ["bounded:staleness=2", "asynchronous"])
@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_checkpoint_has_each_worker_s_rounds_of_the_same_step(
    tmp_path_factory: pytest.TempPathFactory, rule: str, seed: int, servers: int, leaves: bool
) -> None:
    """Also when one has left before another checkpoint, which then is of the others."""
    random = Random(seed)
    folder = tmp_path_factory.mktemp("checkpoints")
    with closing(
        MemoryJob(
            WORKERS, servers, SIZE // 2, rule, optimizer=Remembering, lets_leave="bounded" in rule,
            checkpoints=str(folder),
        )
    ) as job:  # fmt: skip
        for worker in job.workers:
            worker.steps.make_own(0)
        keys = [job.declare("often", SIZE), job.declare("seldom", SIZE)]
        for key in keys:
            job.workers[0].call(key[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        cuts = sorted(random.sample(range(1, STEPS), 2))
        # A worker that leaves makes fewer steps, and reaches the first checkpoint.
        last = random.randint(cuts[0] + 1, STEPS) if leaves else STEPS
        scripts = [
            Script(job, rank, keys, cuts, last if rank == 1 else STEPS) for rank in range(WORKERS)
        ]
        moods = Moods(random)
        while True:
            events: List[Event] = [
                *job.events(ahead=3), *((one.go_on,) for one in scripts if one.step < one.last)
            ]  # fmt: skip
            one = scripts[1]
            if one.step == one.last < STEPS and one.worker.may_leave:
                events.append((one.worker.leave,))
            if not events:
                break
            function, *arguments = moods.choice(events)
            function(*arguments)
        job.finish()
        assert not any(worker.failures for worker in job.workers)
        assert not any(worker.under_way for worker in job.workers)
        checkpoints = job.workers[0].data_plane.checkpoints
        for server in job.servers:
            server.consumer.checkpoints.close()
        job.finish()
        for worker in job.workers:
            worker.loop.make_calls()
        complete = list(checkpoints._complete)
        for server in job.servers:
            assert not server.consumer.checkpoints.waits_for_rounds
        if not leaves:  # nothing is held back for ever, and all counts once
            for key, round_ in zip(keys, Script.rounds(STEPS)):
                np.testing.assert_array_equal(job.kept(key[0]), values(WORKERS, round_)[round_])
    saved = newest(str(folder), "here")
    assert saved is not None and (not complete or complete[-1] <= saved.step)
    # The second is left out if the first is still being written.
    assert saved.step in cuts
    for name, often in (("often", True), ("seldom", False)):
        of_key = saved.key(0, name)
        rounds = [Script.rounds(min(saved.step, one.last))[not often] for one in scripts]
        np.testing.assert_array_equal(of_key.value, expected(rounds))
        assert {state.numbers["updates"] for state in of_key.states} == (
            {sum(rounds)} if sum(rounds) else set()
        )


def expected(rounds: List[int]) -> np.ndarray:
    """The value with so many pushes of each worker."""
    value = np.ones(SIZE, np.float32)
    for rank, last in enumerate(rounds):
        for round_ in range(1, last + 1):
            value += gradient(rank, round_)
    return value


def reached(step: int, round_: int, own: bool = True) -> CutReached:
    return CutReached(step, [StoreAtCut(ResumedStore(0, 1, {}), False, [(0, round_)], {}, own)])


def test_what_no_worker_would_say_is_refused(tmp_path: Path) -> None:
    with closing(MemoryJob(2, 1, SIZE, "bounded:staleness=2", checkpoints=str(tmp_path))) as job:
        for worker in job.workers:
            worker.steps.make_own(0)
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.workers[0].call(keys[0], 1, np.ones(SIZE, np.float32), None)
        job.finish()
        checkpoints = job.servers[0].consumer.checkpoints
        with pytest.raises(ProtocolError, match=r"'w' 0 times before step 4, .* has pushed more"):
            checkpoints.reach(1, reached(4, 0))
        with pytest.raises(ProtocolError, match="a store whose rounds workers share"):
            reached(4, 1, own=False)
        with pytest.raises(ProtocolError, match="a checkpoint without stores"):
            checkpoints.reach(1, CutReached(4, []))
        checkpoints.reach(0, reached(4, 1))
        with pytest.raises(ProtocolError, match=r"'w' 2 times before step 4, .* worker 1 times"):
            checkpoints.reach(1, reached(4, 2))


@pytest.mark.parametrize(
    ("train", "rule"),
    [
        pytest.param(with_torch, "bounded:staleness=3", marks=[NEEDS_TORCH, pytest.mark.long]),
        pytest.param(with_torch, "asynchronous", marks=[NEEDS_TORCH, pytest.mark.long]),
        (with_the_other, "bounded:staleness=3"),
    ],
)
def test_a_job_goes_on_with_all_pushes_of_the_steps_before_and_no_others(
    tmp_path: Path, train: Callable[..., JobResult], rule: str
) -> None:
    """On another number of servers. Adam's counts go on, which are of all workers' pushes."""
    settings = {
        "P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 4, "P3KV_CONSISTENCY": rule,
        "P3KV_SLICE_SIZE": 15,
    }  # fmt: skip
    result = train(11, servers=2, **settings)
    assert result.code == 0, result.output
    assert updates(tmp_path) == (16, 3 * 8)  # both optimizers' steps count
    result = train(servers=3, P3KV_RESUME=1, **settings)
    assert result.code == 0, result.output
    assert result.output.count("all pushes count once, after 8 steps") == 3, result.output
    step, count = updates(tmp_path)
    assert step > 16 and count == 3 * step // 2


def updates(folder: Path) -> Tuple[int, int]:
    """The newest checkpoint's step, and how often it says that Adam has updated a weight, which is
    in the last store."""
    saved = newest(str(folder), "127.0.0.1")
    assert saved is not None
    states = [state.numbers for state in saved.key(len(saved.stores) - 1, 0).states]
    counts = {one["updates"] if "updates" in one else one["values"]["step"][0] for one in states}
    assert len(counts) == 1
    return saved.step, int(counts.pop())
