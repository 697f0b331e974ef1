"""Workers with fewer batches leave, and the others go on with the right sums, or an error."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from random import Random
from typing import List, Sequence, Tuple, Type

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p3kv.consistency import BulkSynchronous
from p3kv.errors import PeerLostError
from p3kv.scheduler.job import Job as ScheduledJob
from p3kv.server.optimizer import Optimizer
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import (
    BarrierPassed,
    BarrierReached,
    Bye,
    FirstSliceSize,
    JobSettings,
    Measured,
    NewSliceSizes,
    Ready,
    SliceSizes,
)
from p3kv.worker.global_norms import ClippedStep
from tests.adding import Adding, AddingWhole
from tests.consistency.test_schedules import (
    RULES,
    SELDOM,
    SIZE,
    Consistency,
    Moods,
    Script,
    Training,
    gradient,
)
from tests.engines import end_round, missing, push_rows
from tests.frontends.test_rows import COLUMNS, key_of
from tests.frontends.test_rows import rows as some_rows
from tests.scheduled import SLICE_SIZE, aborted, assembled, of, worker
from tests.whole_jobs.test_host_sums import run_on_hosts


class Following(Adding):
    """As an optimizer to which worker rank 0 tells a number for each update."""

    needs_rank_0 = True


def values(steps: Sequence[int], whole: bool) -> List[np.ndarray]:
    """A key's value after each round, of which each worker makes its own number."""
    after = [np.ones(SIZE, np.float32)]
    for round_ in range(1, max(steps) + 1):
        ranks = [rank for rank, most in enumerate(steps) if round_ <= most]
        total = np.sum([gradient(rank, round_) for rank in ranks], axis=0)
        after.append(after[-1] + total + (total.max() if whole else 0))
    return after


@pytest.mark.parametrize("rule", RULES)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(SELDOM, 9), min_size=2, max_size=4),
    st.integers(1, 2),
    st.sampled_from([Adding, AddingWhole]),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_each_round_has_the_sum_of_the_workers_that_are_left(
    rule: Type[Consistency],
    seed: int,
    steps: List[int],
    servers: int,
    optimizer: Type[Optimizer],
    clips: bool,
    per_host: int,
) -> None:
    random = Random(seed)
    if rule is not BulkSynchronous:
        per_host = 1  # no sums of hosts by other rules
    if clips:
        steps[0] = max(steps)  # or the job would end, as another test shows
    whole = optimizer.whole_tensors
    seldom = [most // SELDOM for most in steps]
    expected = {"often": values(steps, whole), "seldom": values(seldom, whole)}
    job = Training(
        len(steps), servers, rule, optimizer=optimizer, lets_leave=True, per_host=per_host
    )
    with closing(job):
        scripts = []
        for rank, one in enumerate(job.workers):
            scripts.append(Script(job, one, rank, random, rule(len(steps))))
            scripts[-1].train(expected["often"], clips, steps[rank], expected["seldom"])
        sizes = [SIZE // 5, SIZE, SIZE // 3, SIZE // 2]
        ahead, moods = random.choice([1, 3]), Moods(random)
        while events := [
            *job.events(ahead), *((one.leave,) for one in job.workers if one.may_leave)
        ]:  # fmt: skip
            if sizes and not job.workers[0].left and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
            assert all(server.most_open() <= rule.window + 1 for server in job.servers)
        for one in job.workers:
            assert one.left and not one.failures
        for script in scripts:
            for check in script.checks:
                check()
        for name, after in expected.items():
            np.testing.assert_array_equal(job.kept(job.keys[name][0]), after[-1])
        for server in job.servers:
            assert server.failures == []
            assert server.most_open() == 0
            assert server.consumer.engine.pulls == {}
            assert not server.consumer.engine.state.clipped.steps


def sums_of_hosts(
    rounds: List[int], fresh: Sequence[Sequence[bool]], per_host: int
) -> List[np.ndarray]:
    """A key's value after each round: those that are there sum by host, in the order of ranks, and
    hosts come in the order of the first worker that is there."""
    hosts = [range(first, first + per_host) for first in range(0, len(rounds), per_host)]
    value = np.ones(SIZE, np.float32)
    after = [value]
    for round_ in range(1, max(rounds) + 1):
        sums = {}
        for host in hosts:
            there = [rank for rank in host if rank < len(rounds) and round_ <= rounds[rank]]
            for rank in there:
                if fresh[rank][round_]:
                    mine = fraction(rank, round_)
                    sums[there[0]] = sums[there[0]] + mine if there[0] in sums else mine
        if sums:
            value = value + functools.reduce(np.add, [sums[first] for first in sorted(sums)])
        after.append(value)
    return after


def fraction(rank: int, round: int) -> np.ndarray:
    """A gradient whose sums depend on their order."""
    return np.random.RandomState([rank, round]).standard_normal(SIZE).astype(np.float32)


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 5), min_size=2, max_size=6),
    st.integers(1, 2),
    st.integers(2, 4),
)
# The only neighbour leaves before it has anything to send.
@example(0, [1, 4, 2, 3], 1, 2)
@settings(max_examples=40, deadline=None)
def test_workers_of_a_host_sum_what_those_have_that_are_left_bit_for_bit(
    seed: int, rounds: List[int], servers: int, per_host: int
) -> None:
    """While some want results and others do not, some have no gradient, and sizes change."""
    random = Random(seed)
    fresh = [[random.random() < 0.7 for _ in range(most + 1)] for most in rounds]
    expected = sums_of_hosts(rounds, fresh, per_host)
    targets: List[Tuple[int, np.ndarray]] = []
    job = Training(len(rounds), servers, lets_leave=True, per_host=per_host, deterministic=True)
    with closing(job):
        keys = job.keys["often"]
        job.workers[0].call(keys[0], INITIAL_ROUND, expected[0].copy(), None)
        for rank, one in enumerate(job.workers):
            for round_ in range(1, rounds[rank] + 1):
                target = np.full(SIZE, np.nan, np.float32) if random.random() < 0.5 else None
                one.call(keys[rank], round_, fraction(rank, round_), target)
                if target is not None:
                    targets.append((round_, target))
                if not fresh[rank][round_]:
                    one.calls[-1].changes = Future()
                    one.calls[-1].has_gradient = False
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        while events := [
            *job.events(3), *((one.leave,) for one in job.workers if one.may_leave)
        ]:  # fmt: skip
            if sizes and not job.workers[0].left and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        for one in job.workers:
            assert one.left and not one.failures
            assert not any(s.part for s in one.data_plane.host_sums._carried._sums.values())
        assert not any(server.failures or server.most_open() for server in job.servers)
        np.testing.assert_array_equal(job.kept(keys[0]), expected[-1])
        for round_, target in targets:
            np.testing.assert_array_equal(target, expected[round_])


def test_a_worker_that_has_no_gradient_and_leaves_is_counted_before_its_goodbye() -> None:
    with closing(Training(2, 1, lets_leave=True)) as job:
        (first, other), keys = job.workers, job.keys["often"]
        first.call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        first.call(keys[0], 1, gradient(0, 1), None)
        job.finish()
        other.call(keys[1], 1, gradient(1, 1), None)
        other.calls[-1].changes = Future()
        other.calls[-1].has_gradient = False
        other.begin()
        assert other.may_leave, "nothing is needed any more of a gradient that there is not"
        other.leave()
        job.finish()
        np.testing.assert_array_equal(job.kept(keys[0]), 1 + gradient(0, 1))


def test_a_worker_stays_until_its_neighbours_have_the_values_that_only_they_want() -> None:
    with closing(Training(2, 1, per_host=2, deterministic=True)) as job:
        (carrier, other), keys = job.workers, job.keys["often"]
        target = np.zeros(SIZE, np.float32)
        carrier.call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.finish()
        carrier.call(keys[0], 1, gradient(0, 1), None)
        other.call(keys[1], 1, gradient(1, 1), target)
        while carrier.under_way:
            function, *arguments = next(job.events())
            function(*arguments)
        done: Future = Future()
        carrier.data_plane.finish(done)
        assert not done.done()
        job.finish()
        assert done.done() and carrier.may_leave and not other.under_way
        np.testing.assert_array_equal(target, 1 + gradient(0, 1) + gradient(1, 1))


@pytest.mark.parametrize("lets_leave", [False, True])
@pytest.mark.parametrize(
    "why", ["its push", "a first round", "clipping", "its numbers", "an initial value"]
)
def test_worker_0_ends_the_job_where_it_is_missed(why: str, lets_leave: bool) -> None:
    optimizer = Following if why == "its numbers" else Adding
    with closing(Training(2, 1, optimizer=optimizer, lets_leave=lets_leave)) as job:
        (first, other), keys, (server,) = job.workers, job.keys["often"], job.servers
        gives = why != "an initial value"
        if gives:
            first.call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        if why == "clipping":
            first.data_plane.global_norms.begin(1)
        if gives and why != "a first round":
            for rank, one in enumerate(job.workers):
                one.call(keys[rank], 1, gradient(rank, 1), None)
            if why == "clipping":
                elems = dict(keys[0].runs)
                first.data_plane.global_norms.end_pushes(ClippedStep(0, 1, 1, 1e9, elems))
        job.finish()
        first.leave()
        job.finish()
        assert server.failures == []
        if gives:
            round_ = 1 if why == "a first round" else 2
            other.call(keys[1], round_, gradient(1, round_), None)
        else:
            other.call(keys[1], INITIAL_ROUND, None, np.zeros(SIZE, np.float32))
        job.finish()
        if lets_leave and why == "its push":
            assert server.failures == []
            return
        failure = server.failures[0]
        assert failure.rank == 0
        what = f"worker 1 went on to round {1 if why == 'a first round' else 2} of key 'often'"
        assert (what if gives else "key 'often' has no initial value for worker 1") in failure.words


@pytest.mark.parametrize("deterministic", [False, True])
def test_rounds_of_a_key_of_rows_end_without_those_that_have_left(deterministic: bool) -> None:
    key = key_of(3, deterministic)
    for rank in range(3):
        push_rows(key, rank, 1, 1, some_rows([rank, 5], rank), 1)
    end_round(key)
    for rank in (1, 2):
        push_rows(key, rank, 2, 1, some_rows([rank], rank), 2)
    assert key.rounds.next() is None
    assert missing(key) == {2: [0]}
    key.plan.state.left.add(0)
    end_round(key)
    expected = np.zeros((12, COLUMNS), np.float32)
    for rank in (1, 2):
        expected[rank] = some_rows([rank], rank).elements
    np.testing.assert_array_equal(key.value, expected)


def lenient(**job: object) -> ScheduledJob:
    """A job of three workers in which they may leave."""
    started = assembled(3, 1)
    for rank in range(3):
        started.handle(worker(rank), Ready(JobSettings(let_workers_leave=True, **job)))
    return started


def test_a_sum_is_of_those_that_are_left_also_without_worker_0() -> None:
    job = lenient(slice_size=SLICE_SIZE)
    assert job.handle(worker(0), Bye()) == []
    assert job.handle(worker(1), BarrierReached("to sum", numbers=(2,))) == []
    passed = of(job.handle(worker(2), BarrierReached("to sum", numbers=(3,))), BarrierPassed)
    assert {identity: one.totals for identity, one in passed.items()} == {
        worker(1): (5,), worker(2): (5,),
    }  # fmt: skip


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_barrier_waits_for_those_that_are_left(leaves_first: bool) -> None:
    job = lenient(slice_size=SLICE_SIZE)
    for barrier in range(2):
        if leaves_first and barrier == 0:
            assert job.handle(worker(0), Bye()) == []
        assert job.handle(worker(1), BarrierReached()) == []
        passed = job.handle(worker(2), BarrierReached())
        if not leaves_first and barrier == 0:
            assert passed == []
            passed = job.handle(worker(0), Bye())
        assert set(of(passed, BarrierPassed)) == {worker(1), worker(2)}


@pytest.mark.parametrize("leaves_first", [False, True])
def test_what_workers_do_together_needs_worker_0(leaves_first: bool) -> None:
    job = lenient(slice_size=SLICE_SIZE)
    if leaves_first:
        assert job.handle(worker(0), Bye()) == []
    ended = job.handle(worker(1), BarrierReached("to load states"))
    if not leaves_first:
        assert ended == []
        ended = job.handle(worker(0), Bye())
    failure = aborted(ended, "ended while others still needed it", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 0)


def test_slices_keep_their_size_when_worker_0_has_left() -> None:
    job = lenient()
    for rank in range(3):
        replies = job.handle(worker(rank), Measured(1e9))
    assert set(of(replies, FirstSliceSize)) == {worker(0), worker(1), worker(2)}
    job.handle(worker(0), Bye())
    for rank in (1, 2):
        assert of(job.handle(worker(rank), Measured(1e3)), NewSliceSizes) == {}
    assert job.failure is None


@pytest.mark.parametrize("per_host", [1, 3])
def test_three_workers_with_5_8_and_11_batches(tmp_path: Path, per_host: int) -> None:
    job = run_on_hosts(
        per_host, "unequal.py", tmp_path, workers=3,
        P3KV_LET_WORKERS_LEAVE=1, P3KV_DETERMINISTIC=1, P3KV_SLICE_SIZE=500,
    )  # fmt: skip
    assert job.code == 0, job.output
    for rank, batches in enumerate((5, 8, 11)):
        assert f"{batches} batches" in job.said_by(f"worker {rank}")
    assert "the job goes on without worker 0" in job.said_by("server 0")
    assert (tmp_path / "states").exists()
