"""Rounds that are each worker's own: nobody waits for anybody, and every push counts once."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import closing
from random import Random
from typing import Any, Callable, List, Type

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.common.registry import Choice
from p3kv.consistency import Asynchronous, BulkSynchronous
from p3kv.errors import P3Error, ProtocolError
from p3kv.server.optimizer import Optimizer
from p3kv.wire.fields import Header, StateHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, URGENT, Kind
from p3kv.wire.messages import CodecChoices, SliceSizes
from tests.adding import Adding, AddingWhole
from tests.consistency.test_schedules import SIZE, STEPS, Moods, Script, Training, values
from tests.in_memory import OWN_STORE, MemoryJob

MOST_ROUNDS = 9
PATTERN = np.random.RandomState(7).randint(1, 10, SIZE).astype(np.float32)
"""Of a gradient's elements, so that no slice has the values of another."""
UNIT = [1.0, 16.0, 256.0]
"""By rank: what a push counts. More than `MOST_ROUNDS` of one are less than one of the next."""


def pushes(received: np.ndarray, workers: int, whole: bool) -> np.ndarray:
    """How many pushes of each worker every element of a value has, of shape (workers, SIZE)."""
    scale = PATTERN + (PATTERN.max() if whole else 0)
    counts = (received - 1) / scale
    assert (counts == counts.astype(int)).all(), "no whole number of pushes"
    return np.array([counts.astype(int) // int(UNIT[rank]) % 16 for rank in range(workers)])


class OwnScript:
    """One worker's calls, as many rounds as it likes."""

    def __init__(self, job: Both, rank: int, rounds: int, random: Random) -> None:
        self.rounds = rounds
        self.checks: List[Callable[[], None]] = []
        self._job, self._rank, self._random = job, rank, random

    def train(self) -> None:
        worker, key = self._job.workers[self._rank], self._job.own[self._rank]
        if self._rank == 0:
            worker.call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        for round_ in range(1, self.rounds + 1):
            target = np.full(SIZE, np.nan, np.float32) if self._random.random() < 0.5 else None
            worker.call(key, round_, PATTERN * UNIT[self._rank], target)
            if target is not None:
                self.checks.append(lambda t=target, r=round_: self._check(t, r, exactly=True))
            if self._random.random() < 0.3:
                pulled = np.full(SIZE, np.nan, np.float32)
                worker.call(key, round_, None, pulled)
                self.checks.append(lambda t=pulled, r=round_: self._check(t, r, exactly=False))

    def _check(self, received: np.ndarray, round_: int, exactly: bool) -> None:
        """A result has this worker's pushes up to its own, and a pull's value perhaps more. A value
        of slices that are updated together has the same pushes of each worker in all."""
        whole = self._job.whole
        counts = pushes(received, len(self._job.workers), whole)
        own = counts[self._rank]
        assert (own == round_).all() if exactly else (own >= round_).all()
        if whole and exactly:
            assert (counts == counts[:, :1]).all()


class Both(Training):
    """A job with two keys whose rounds all share, and one whose rounds are each worker's own."""

    def __init__(self, workers: int, servers: int, optimizer: Type[Optimizer] = Adding) -> None:
        super().__init__(workers, servers, optimizer=optimizer)
        self.whole = optimizer.whole_tensors
        self.own = self.declare("own", SIZE, own=True)

    def set_optimizers(self, optimizer: Type[Optimizer] = Adding) -> None:
        for server in self.servers:
            server.set_optimizer(OWN_STORE, optimizer())


@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([Adding, AddingWhole]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_push_counts_once_and_no_worker_waits_while_others_share_rounds_and_sizes_change(
    seed: int, workers: int, servers: int, optimizer: Type[Optimizer], clips: bool
) -> None:
    random = Random(seed)
    expected = values(workers, STEPS, optimizer.whole_tensors)
    with closing(Both(workers, servers, optimizer)) as job:
        shared = [
            Script(job, worker, rank, random, BulkSynchronous(workers))
            for rank, worker in enumerate(job.workers)
        ]
        own = [
            OwnScript(job, rank, random.randint(0, MOST_ROUNDS), random) for rank in range(workers)
        ]
        for worker, *scripts in zip(job.workers, own, shared):
            scripts[0].train()
            scripts[1].train(expected, clips)
            # What the script calls for one store goes on beside what it calls for the other.
            first = list(worker.calls)
            worker.calls.clear()
            worker.calls.extend(merged(first, scripts[0].rounds and OWN_STORE, random))
        sizes = [SIZE // 5, SIZE, SIZE // 3, SIZE // 2]
        ahead, moods = random.choice([1, 3]), Moods(random)
        missing = list(job.servers)
        while (events := list(job.events(ahead))) or missing:
            if missing and (not events or random.random() < 0.02):
                missing.pop().set_optimizer(OWN_STORE, optimizer())
                continue
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
            assert all(server.most_own() <= Asynchronous.window for server in job.servers)
        for worker in job.workers:
            assert worker.under_way == 0 and not worker.failures
        for script in (*own, *shared):
            for check in script.checks:
                check()
        counts = pushes(job.kept(job.own[0]), workers, job.whole)
        for script, count in zip(own, counts):
            assert (count == script.rounds).all()
        np.testing.assert_array_equal(job.kept(job.keys["often"][0]), expected[STEPS])
        assert all(server.most_own() == 0 for server in job.servers)
        assert all(server.consumer.engine.pulls == {} for server in job.servers)


def merged(calls: List[Any], store: int, random: Random) -> List[Any]:
    """Calls for two stores in some order that keeps that of each store."""
    one = [call for call in calls if call.key.store == store]
    other = [call for call in calls if call.key.store != store]
    order = [one] * len(one) + [other] * len(other)
    random.shuffle(order)
    return [calls.pop(0) for calls in order]


class Alone(Both):
    """A job in which the workers' calls take effect at once."""

    def push(self, rank: int, round_: int) -> np.ndarray:
        target = np.full(SIZE, np.nan, np.float32)
        self.workers[rank].call(self.own[rank], round_, PATTERN * UNIT[rank], target)
        self.finish()
        return target

    def initialise(self) -> None:
        self.workers[0].call(self.own[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        self.finish()


def test_a_worker_goes_on_while_another_has_pushed_nothing() -> None:
    with closing(Alone(2, 2)) as job:
        job.set_optimizers()
        job.initialise()
        for round_ in range(1, 8):
            np.testing.assert_array_equal(job.push(0, round_), 1 + round_ * PATTERN)
        assert list(job.servers[0].consumer.engine.longest_waits(0.0, time.monotonic())) == []
        # The other's first push finds them all, and so does the first one's next.
        np.testing.assert_array_equal(job.push(1, 1), 1 + (7 + 16) * PATTERN)
        np.testing.assert_array_equal(job.push(0, 8), 1 + (8 + 16) * PATTERN)


def test_pushes_wait_for_the_initial_value_and_the_optimizer_of_which_others_are_told() -> None:
    with closing(Alone(2, 1)) as job:
        (server,) = job.servers
        early = job.push(1, 1)
        (wait, *_) = server.consumer.engine.longest_waits(0.0, time.monotonic())
        assert (wait.round, wait.missing, wait.arrived) == (INITIAL_ROUND, [0], [1])
        job.initialise()
        (wait, *_) = server.consumer.engine.longest_waits(0.0, time.monotonic())
        assert (wait.round, wait.missing, wait.arrived) == (1, [0], [1])
        assert np.isnan(early).all() and job.workers[1].under_way == 1
        job.set_optimizers()
        job.finish()
        np.testing.assert_array_equal(early, 1 + 16 * PATTERN)
        assert list(server.consumer.engine.longest_waits(0.0, time.monotonic())) == []


@pytest.mark.parametrize("leaves", [False, True])
def test_pushes_wait_until_worker_0_has_begun_a_step_and_the_job_ends_if_it_has_left(
    leaves: bool,
) -> None:
    """It may still change what it has set: the batch size, or the rate."""
    with closing(Alone(2, 1)) as job:
        (server,) = job.servers
        job.initialise()
        announced = Adding()
        announced.in_step = False
        server.set_optimizer(OWN_STORE, announced)
        early = job.push(1, 1)
        (wait, *_) = server.consumer.engine.longest_waits(0.0, time.monotonic())
        assert (wait.round, wait.missing, wait.arrived) == (1, [0], [1])
        assert np.isnan(early).all()
        if leaves:
            job.workers[0].servers[0].writer.push(Frame(URGENT, Header(Kind.BYE, 0)))
            job.finish()
            (failure, *_) = server.failures
            assert failure.rank == 0 and "went on to round 1 of key 'own'" in failure.reason
            return
        job.set_optimizers()
        job.finish()
        np.testing.assert_array_equal(early, 1 + 16 * PATTERN)
        assert not np.isnan(job.push(0, 1)).any()


def test_a_worker_that_has_left_is_missed_by_nobody_unless_it_owes_the_first_value() -> None:
    with closing(Alone(2, 1)) as job:
        (server,) = job.servers
        job.set_optimizers()
        job.initialise()
        job.workers[0].servers[0].writer.push(Frame(URGENT, Header(Kind.BYE, 0)))
        job.finish()
        assert not np.isnan(job.push(1, 1)).any()
        assert server.failures == []
    with closing(Alone(2, 1)) as job:
        job.workers[0].servers[0].writer.push(Frame(URGENT, Header(Kind.BYE, 0)))
        job.push(1, 1)
        assert {failure.rank for failure in job.servers[0].failures} == {0}


def test_steps_that_are_a_worker_s_own_do_not_count_for_others() -> None:
    """Gates, new slice sizes and settings follow the steps that all workers make."""
    with closing(Alone(1, 1)) as job:
        job.set_optimizers()
        job.initialise()
        (worker,), shared = job.workers, job.keys["often"][0]
        for round_ in range(1, 6):
            job.push(0, round_)
        assert worker.steps.new_step() == 1
        assert worker.steps.new_step(OWN_STORE) == 6
        worker.steps.send_settings(6, b"", OWN_STORE)
        assert worker.settings == [(6, 5)]
        worker.tuning.want(SliceSizes(SIZE // 5))
        worker.call(shared, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        worker.call(shared, 1, np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32))
        job.finish()
        assert worker.sizes.generation(1 + BulkSynchronous.window) == 1


def test_no_gate_holds_the_gradients_of_a_worker_s_own_step() -> None:
    """The worker on a server's host may be at an older step for ever."""
    with closing(Alone(1, 1)) as job:
        job.set_optimizers()
        job.initialise()
        egress = job.workers[0].data_plane._egress
        egress._before_bytes = 1 << 30
        egress.open(0, 1)
        for round_ in range(1, 4):
            assert not np.isnan(job.push(0, round_)).any()


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
def test_a_server_counts_each_worker_s_rounds_by_themselves(kind: Kind) -> None:
    with closing(Alone(2, 1)) as job:
        job.set_optimizers()
        job.initialise()
        for round_ in range(1, 5):
            job.push(0, round_)
        consumer = job.servers[0].consumer
        for rank, round_ in ((0, 7), (1, 3)):
            key = job.own[0].key_id
            header = kind.header(
                kind, rank, payload_bytes=SIZE // 2 * 4, key=key, round=round_, step=round_
            )
            with pytest.raises(ProtocolError, match=f"at round {round_} of key 'own', slice 0"):
                if kind == Kind.PUSH:
                    consumer.land_push(job.servers[0].connections[rank], header)
                else:
                    consumer.engine.key(header.key, header.rank).check_ahead(round_, rank)


def test_a_push_is_not_counted_twice() -> None:
    with closing(Alone(2, 1)) as job:
        job.set_optimizers()
        job.initialise()
        job.push(1, 1)
        worker, key = job.workers[1], job.own[1]
        worker.call(key, 1, PATTERN, None)
        worker.exchange.begin(worker.calls.pop())
        with pytest.raises(P3Error, match="worker 1 pushed key 'own', slice 0 twice in round 1"):
            job.finish()


def test_states_of_slices_without_a_common_round_are_refused() -> None:
    with closing(Alone(1, 1)) as job:
        header = StateHeader(Kind.STATES, 0, key=job.own[0].key_id)
        with pytest.raises(ProtocolError, match="states of key 'own'"):
            job.servers[0].consumer.states.ask(job.servers[0].connections[0], header, None)


@pytest.mark.parametrize("pulls", [False, True])
def test_a_value_is_exact_for_the_worker_that_asks_also_after_later_updates(pulls: bool) -> None:
    """As of the last push before a checkpoint, whose answer waits for a slower worker."""
    tenth = np.full(SIZE, 0.1, np.float32)  # which float16 rounds
    codecs = CodecChoices(Choice("identity"), Choice("float16"))
    with closing(MemoryJob(2, 1, SIZE // 2, "bounded:staleness=1", codecs=codecs)) as job:
        fast, slow = job.workers
        key = job.declare("w", SIZE)
        fast.call(key[0], INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        target, other = (np.full(SIZE, np.nan, np.float32) for _ in range(2))
        fast.call(key[0], 1, tenth, np.zeros(SIZE, np.float32))
        fast.call(key[0], 2, tenth, None if pulls else target, exact=True)
        if pulls:
            fast.call(key[0], 2, None, target, exact=True)
        job.finish()
        assert np.isnan(target).all()
        slow.call(key[1], 1, tenth, other)
        job.finish()
        np.testing.assert_array_equal(target, tenth + tenth + tenth)
        assert (other != target).any()


def test_a_push_without_a_gradient_learns_whether_others_have_changed_the_value() -> None:
    """Since its last answer: a worker that does not train a weight takes what others train."""
    with closing(Alone(2, 1)) as job:
        job.set_optimizers()
        job.initialise()
        for round_, trains in enumerate([False, True, False, True, False], 1):
            if trains:
                job.push(0, round_ // 2)
            changes: Future[bool] = Future()
            target = np.zeros(SIZE, np.float32)
            job.workers[1].call(job.own[1], round_, target, target, changes=changes)
            job.finish()
            assert changes.result(0) == trains
            np.testing.assert_array_equal(target, 1 + round_ // 2 * PATTERN)
