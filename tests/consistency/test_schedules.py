"""Whatever the order of events: every result is right, nobody contradicts anybody, all ends."""

from __future__ import annotations

from contextlib import closing
from random import Random
from typing import Callable, Dict, List, Optional, Type

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import once  # noqa: F401  registers it
import own_layout  # noqa: F401  registers it
from own_consistency import OneBehind
from p3kv.consistency import BulkSynchronous, Consistency
from p3kv.errors import ProtocolError
from p3kv.server.optimizer import Optimizer
from p3kv.wire.fields import Header, UpdatedHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.wire.messages import SliceSizes
from p3kv.worker.global_norms import ClippedStep
from tests.adding import Adding, AddingWhole
from tests.in_memory import Event, MemoryJob, Worker

SIZE = 12_000
"""With slices of half of it, each is a write of its own."""
ROW = 1_500
"""Fits into slices of some sizes several times, and does not divide them all."""
STEPS = 9
SELDOM = 3
"""The second key is trained in one of so many steps."""
WINDOW = BulkSynchronous.window
RULES = (BulkSynchronous, OneBehind)


def gradient(rank: int, round: int) -> np.ndarray:
    return np.random.RandomState([rank, round]).randint(0, 9, SIZE).astype(np.float32)


def values(workers: int, rounds: int, whole: bool = False) -> List[np.ndarray]:
    """What a key's value is after each round: whole numbers, exact in any order."""
    after = [np.ones(SIZE, np.float32)]
    for round_ in range(1, rounds + 1):
        total = np.sum([gradient(rank, round_) for rank in range(workers)], axis=0)
        after.append(after[-1] + total + (total.max() if whole else 0))
    return after


class Moods:
    """Some processes and connections are quick and some slow, until that changes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._numbers: Dict[int, float] = {}

    def choice(self, events: List[Event]) -> Event:
        """What happens next: something of the quickest, one of several."""
        if self._random.random() < 0.02:
            self._numbers.clear()
        self._random.shuffle(events)
        return max(events, key=self._mood)

    def _mood(self, event: Event) -> float:
        whose = id(event[0].__self__)  # type: ignore[attr-defined]
        if whose not in self._numbers:
            self._numbers[whose] = self._random.random()
        return self._numbers[whose]


class Script:
    """One worker's calls: the same pushes as the others', each with or without its result."""

    def __init__(
        self, job: Training, worker: Worker, rank: int, random: Random, rule: Consistency
    ) -> None:
        self._rule = rule
        self._worker = worker
        self._rank = rank
        self._random = random
        self._job = job
        self.checks: List[Callable[[], None]] = []

    def train(
        self,
        expected: List[np.ndarray],
        clips: bool,
        steps: int = STEPS,
        of_seldom: Optional[List[np.ndarray]] = None,
    ) -> None:
        """`clips`: servers hold the rounds of each step for its norm, and nothing is scaled.

        `of_seldom`: what is expected of the second key, if not the same as of the first.
        """
        second = expected if of_seldom is None else of_seldom
        norms = self._worker.data_plane.global_norms
        for name in ("often", "seldom"):
            key = self._job.keys[name][self._rank]
            if self._rank == 0:
                self._worker.call(key, INITIAL_ROUND, expected[0].astype(self._job.dtype), None)
        for step in range(1, steps + 1):
            keys = [(self._job.keys["often"][self._rank], step)]
            if step % SELDOM == 0:
                keys.append((self._job.keys["seldom"][self._rank], step // SELDOM))
            if clips:
                norms.begin(step)
            elems: Dict[int, int] = {}
            for key, round_ in keys:
                self._step(key, round_, expected if key.key == "often" else second)
                for server, length in key.runs:
                    elems[server] = elems.get(server, 0) + length
            if clips:
                norms.end_pushes(ClippedStep(0, step, step, 1e9, elems))

    def _step(self, key, round_, expected) -> None:  # type: ignore[no-untyped-def]
        target = np.full(SIZE, np.nan, self._job.dtype) if self._random.random() < 0.5 else None
        if target is not None and self._rule.needs(round_) <= INITIAL_ROUND:
            target[:] = expected[0]  # as the weight, which then stays as it is
        pushed = gradient(self._rank, round_).astype(self._job.dtype)
        self._worker.call(key, round_, pushed, target)
        if target is not None:
            self.checks.append(lambda: self._check(target, round_, expected[: round_ + 1]))
        if self._random.random() < 0.3:
            pulled = np.full(SIZE, np.nan, self._job.dtype)
            self._worker.call(key, round_, None, pulled)
            self.checks.append(lambda: self._check(pulled, round_, expected[: round_ + 1]))

    def _check(self, received: np.ndarray, round_: int, newest: List[np.ndarray]) -> None:
        """Each slice is of the round that the worker needs or of a later one, and never of one that
        it has called later."""
        allowed = np.array(newest[max(INITIAL_ROUND, self._rule.needs(round_)) :])
        assert (received == allowed).any(axis=0).all()


class Training(MemoryJob):
    """A job that trains two keys, one of them seldom and by rows."""

    def __init__(
        self,
        workers: int,
        servers: int,
        rule: Type[Consistency] = BulkSynchronous,
        codec: str = "identity",
        optimizer: Type[Optimizer] = Adding,
        lets_leave: bool = False,
        per_host: int = 1,
        dtype: str = "float32",
        **more: object,
    ) -> None:
        super().__init__(
            workers, servers, SIZE // 2, rule, codec, optimizer, lets_leave, per_host, dtype, **more
        )
        self.keys = {
            "often": self.declare("often", SIZE),
            "seldom": self.declare("seldom", SIZE // ROW, ROW, layout="rows"),
        }


@pytest.mark.parametrize("rule", RULES)
@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 2),
    # Half precision is exact for the numbers here.
    st.sampled_from(["identity", "float16", "once"]),
    st.sampled_from([Adding, AddingWhole]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_results_are_right_and_rounds_few_while_sizes_change(
    rule: Type[Consistency],
    seed: int,
    workers: int,
    servers: int,
    codec: str,
    optimizer: Type[Optimizer],
    clips: bool,
) -> None:
    random = Random(seed)
    expected = values(workers, STEPS, optimizer.whole_tensors)
    with closing(Training(workers, servers, rule, codec, optimizer)) as job:
        scripts = [
            Script(job, worker, rank, random, rule(workers))
            for rank, worker in enumerate(job.workers)
        ]
        for script in scripts:
            script.train(expected, clips)
        for worker in job.workers:
            worker.data_plane._egress.turns_pay = random.random() < 0.5
        sizes = [SIZE // 5, SIZE, SIZE // 3, SIZE // 2]
        ahead, moods = random.choice([1, 3]), Moods(random)
        while events := list(job.events(ahead)):
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
            assert all(server.most_open() <= rule.window + 1 for server in job.servers)
        for worker in job.workers:
            assert worker.under_way == 0
            assert not worker.failures
            # All rounds have ended, and the worker knows it: only the last step may get pushes.
            worker.steps.send_settings(STEPS, b"")
            assert worker.settings == [(STEPS, STEPS)]
        for name, rounds in (("often", STEPS), ("seldom", STEPS // SELDOM)):
            np.testing.assert_array_equal(job.kept(job.keys[name][0]), expected[rounds])
        for script in scripts:
            for check in script.checks:
                check()
        for server in job.servers:
            assert server.most_open() == 0
            assert server.consumer.engine.pulls == {}
            assert not server.consumer.engine.state.clipped.steps
        if clips:
            totals = [sum(gradient(rank, r) for rank in range(workers)) for r in (9, 9 // SELDOM)]
            norm = np.linalg.norm(np.concatenate(totals).astype(np.float64))
            for worker in job.workers:
                number, known = worker.data_plane.global_norms._norms[0]
                assert (number, known.norm) == (STEPS, pytest.approx(norm, rel=1e-6))
                assert known.is_dropped is False


def test_two_rounds_that_end_at_once_are_two_results() -> None:
    expected = values(2, 2)
    with closing(Training(2, 1)) as job:
        targets = {}
        keys = job.keys["often"]
        job.workers[0].call(keys[0], INITIAL_ROUND, expected[0].copy(), None)
        job.finish()
        for round_ in (2, 1):
            for rank, worker in enumerate(job.workers):
                target = targets[rank, round_] = np.zeros(SIZE, np.float32)
                worker.call(keys[rank], round_, gradient(rank, round_), target)
            job.finish()
        for (_, round_), target in targets.items():
            np.testing.assert_array_equal(target, expected[round_])


def test_a_slice_counts_once_and_only_from_the_server_that_keeps_it() -> None:
    with closing(Training(1, 2)) as job:
        worker, key = job.workers[0], job.keys["often"][0]
        worker.call(key, INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        job.finish()
        worker.call(key, 1, gradient(0, 1), np.zeros(SIZE, np.float32))
        worker.begin()
        (first, *_), peers = key.slices(job._slice_size), worker.servers
        frame = UpdatedHeader(
            Kind.UPDATED, first.server, payload_bytes=first.length * 4, key=key.key_id,
            slice=first.index, round=1, step=1,
        )  # fmt: skip
        with pytest.raises(ProtocolError, match=f"or in place of server {first.server}"):
            worker.data_plane.slices.land(peers[1 - first.server], frame)
        worker.data_plane.slices.land(peers[first.server], frame)
        with pytest.raises(ProtocolError, match="twice in round 1"):
            worker.data_plane.slices.land(peers[first.server], frame)


def test_a_pull_after_slices_have_another_size_and_before_their_first_round() -> None:
    expected = values(1, 4)
    with closing(Training(1, 1)) as job:
        worker, key = job.workers[0], job.keys["often"][0]
        worker.call(key, INITIAL_ROUND, expected[0].copy(), None)
        worker.tuning.want(SliceSizes(SIZE // 5))
        for round_ in range(1, WINDOW + 1):
            worker.call(key, round_, gradient(0, round_), np.zeros(SIZE, np.float32))
            job.finish()
        pulled = np.zeros(SIZE, np.float32)
        worker.call(key, WINDOW, None, pulled)
        job.finish()
        assert worker.sizes.generation(WINDOW + 1) == 1
        np.testing.assert_array_equal(pulled, expected[WINDOW])


def test_a_worker_sends_nothing_for_a_round_that_may_have_other_slices_than_it_knows() -> None:
    with closing(Training(2, 1)) as job:
        ahead, key = job.workers[1], job.keys["often"][1]
        for round_ in range(1, 6):
            ahead.call(key, round_, gradient(1, round_), None)
        out = np.zeros(SIZE, np.float32)
        ahead.call(key, 5, None, out)
        job.finish()
        states = list(job.servers[0].consumer.engine.records())
        assert [sorted(state.rounds.open) for state in states[:2]] == [[1, 2], [1, 2]]
        assert job.servers[0].consumer.engine.pulls == {}
        job.workers[0].tuning.want(SliceSizes(SIZE // 5))
        keys = job.keys["often"]
        job.workers[0].call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        for round_ in range(1, 6):
            job.workers[0].call(keys[0], round_, gradient(0, round_), None)
        job.finish()
        np.testing.assert_array_equal(out, values(2, 5)[5])


@pytest.mark.parametrize("round_", [WINDOW + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
def test_a_server_refuses_rounds_that_nobody_may_be_at(kind: Kind, round_: int) -> None:
    with closing(Training(1, 1)) as job:
        consumer = job.servers[0].consumer
        header = kind.header(kind, 0, payload_bytes=SIZE // 2 * 4, round=round_, step=round_)
        with pytest.raises(ProtocolError, match=f"at round {round_} of key 'often', slice 0"):
            if kind == Kind.PUSH:
                consumer.land_push(job.servers[0].connections[0], header)
            else:
                consumer.engine.key(header.key, header.rank).check_ahead(round_, header.rank)


def test_a_key_that_is_trained_seldom_does_not_go_first() -> None:
    """Its rounds are few, but they are as new as the others'."""
    with closing(Training(1, 1)) as job:
        (worker,) = job.workers
        often, seldom = (job.keys[name][0] for name in ("often", "seldom"))
        worker.exchange.set_order([often.key_id, seldom.key_id])
        for key in (often, seldom):
            worker.call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        for round_ in range(1, 5):
            worker.call(often, round_, gradient(0, round_), np.zeros(SIZE, np.float32))
        job.finish()
        worker.call(often, 5, gradient(0, 5), np.zeros(SIZE, np.float32))
        worker.call(seldom, 1, gradient(0, 1), np.zeros(SIZE, np.float32))
        worker.begin(1)
        job.finish()
        assert worker.complete[-2:] == [("often", 5), ("seldom", 1)]


def test_a_worker_has_left_when_its_last_push_is_added_up_and_not_before() -> None:
    with closing(Training(2, 1)) as job:
        keys, (server,) = job.keys["often"], job.servers
        job.workers[0].call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.finish()
        for round_, ranks in ((1, (0, 1)), (2, (0,))):
            for rank in ranks:
                worker, last = job.workers[rank], rank == 1
                worker.call(keys[rank], round_, gradient(rank, round_), None)
                worker.begin()
                if last:
                    worker.servers[0].writer.push(Frame(-1 << 62, Header(Kind.BYE, rank)))
                job.carry_all(worker.servers[0])
            if round_ == 1:
                # Of worker 1's slices, which have all come, some wait when worker 0's are added.
                assert server.workers.done == {1}
                assert len(server.consumer.queue) == 4
                job.finish()
                assert server.failures == []
        job.finish()
        reasons = [(failure.rank, failure.reason) for failure in server.failures]
        assert all(rank == 1 and "went on to round 2" in reason for rank, reason in reasons)
        assert reasons


def test_slices_of_a_single_round_hand_their_values_on_at_once() -> None:
    """A round that had come before its turn is the only one of its size: two changes follow."""
    with closing(Training(1, 1)) as job:
        worker, key = job.workers[0], job.keys["often"][0]
        expected = values(1, 5)
        worker.call(key, INITIAL_ROUND, expected[0].copy(), None)
        for round_ in (1, 2):
            worker.call(key, round_, gradient(0, round_), None)
        job.finish()
        worker.tuning.announce(4, SliceSizes(SIZE // 3))
        worker.tuning.announce(5, SliceSizes(SIZE // 5))
        for round_ in (4, 3):
            worker.call(key, round_, gradient(0, round_), None)
            job.finish()
        target = np.full(SIZE, np.nan, np.float32)
        worker.call(key, 5, gradient(0, 5), target)
        job.finish()
        assert worker.under_way == 0
        np.testing.assert_array_equal(target, expected[5])


def test_a_worker_goes_on_with_older_values_of_all_slices_of_a_whole_tensor() -> None:
    """The last slice that arrives ends the round of all, and lets the next rounds of all go on."""
    with closing(Training(2, 1, OneBehind, optimizer=AddingWhole)) as job:
        (ahead, behind), keys = job.workers, job.keys["often"]
        ahead.call(keys[0], INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        targets = [np.full(SIZE, np.nan, np.float32) for _ in range(2)]
        for round_ in (1, 2):
            ahead.call(keys[0], round_, gradient(0, round_), targets[round_ - 1])
            job.finish()
        assert ahead.under_way == 1, "the second round's value must be the first's, at least"
        behind.call(keys[1], 1, gradient(1, 1), None)
        job.finish()
        assert ahead.under_way == 0
        np.testing.assert_array_equal(targets[1], values(2, 1, whole=True)[1])


def test_a_server_looks_at_its_sockets_between_two_slices_of_a_clipped_step() -> None:
    """All of them may end when the norm is known, and the first values are needed first."""
    with closing(Training(1, 1)) as job:
        worker, key = job.workers[0], job.keys["often"][0]
        worker.call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
        job.finish()
        worker.data_plane.global_norms.begin(1)
        worker.call(key, 1, gradient(0, 1), None)
        worker.data_plane.global_norms.end_pushes(ClippedStep(0, 1, 1, 1e9, dict(key.runs)))
        consumer = job.servers[0].consumer
        while not any(state.round for state in consumer.engine.records()):
            function, *arguments = next(job.events())
            function(*arguments)
        assert sorted(state.round for state in consumer.engine.records()) == [0, 1]
        job.finish()
