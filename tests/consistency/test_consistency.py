"""When rounds end and workers go on: a rule that users choose and extend."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Dict, List, Type, Union

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import own_changed  # noqa: F401  registers it
from own_consistency import OneBehind
from own_fourth import EveryFourth
from own_prediction import MOMENTUM, RATE, Momentum, PredictsTwo
from p3kv.common.registry import Choice
from p3kv.consistency import (
    CONSISTENCIES,
    BulkSynchronous,
    Consistency,
    LocalTraining,
    make_consistency,
)
from p3kv.errors import ConfigError
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, URGENT, Kind
from p3kv.wire.messages import CodecChoices, JobSettings, SliceSizes
from tests.consistency.test_schedules import Moods
from tests.in_memory import MemoryJob
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    SUMS_ONLY,
    held_port,
    results,
    run_job,
    start_role,
)
from tests.whole_jobs.test_host_sums import run_on_hosts

SIZE = 12
STALENESS = 2
BOUNDED = f"bounded:staleness={STALENESS}"
OWN = {"P3KV_CONSISTENCY": "one_behind"}
PLUGIN = {"P3KV_PLUGINS": "own_consistency"}


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`CONSISTENCIES.register`, whose effect ends with the test."""
    monkeypatch.setattr(CONSISTENCIES, "_members", dict(CONSISTENCIES._members))
    return CONSISTENCIES.register


# The table and its members.


def test_bulk_synchronous_is_the_default_and_waits_for_every_worker_s_push_and_own_round() -> None:
    rule = make_consistency(JobSettings().consistency, 3)
    assert type(rule) is BulkSynchronous
    assert [rule.needs(round_) for round_ in (1, 2, 70)] == [1, 2, 70]
    assert not rule.lets_go_ahead and rule.exchanges_all


def own(**changes: Any) -> Type[Consistency]:
    return type("Own", (OneBehind,), changes)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (own(needs=lambda self, round: round + 1), "round 1 needs the value of round 2"),
        (own(needs=lambda self, round: 4), "round 1 needs the value of round 4"),
        (own(needs=lambda self, round: round / 2), "round 1 needs the value of round 0.5"),
        (own(needs=lambda self, round: [][round]), "failed: IndexError"),
        (own(window=0), "window of 0"),
        (own(predicts=-1), "predicts -1 updates"),
        (own(window=2.5), "window of 2.5"),
        (own(needs=lambda self, round: -round), "round 2 needs the value of round -2, and the"),
        (own(exchanges=lambda self, push: push > 10_000), "exchanges none of 9999 pushes"),
        (own(exchanges=lambda self, push: push % 2), "answers 1 when it is asked whether push 1"),
        (own(needs=Consistency.needs, __abstractmethods__={"needs"}), "failed: TypeError"),
    ],
    ids=[
        "late",
        "constant",
        "half",
        "raises",
        "no window",
        "predicts",
        "no number",
        "backwards",
        "never",
        "perhaps",
        "abstract",
    ],
)
def test_a_rule_that_can_t_be_right_is_refused_and_named(
    register: Any, rule: Type[Consistency], why: str
) -> None:
    register("own", rule)
    with pytest.raises(ConfigError, match=rf"the consistency 'own' .*{why}"):
        make_consistency("own", 2)


@given(st.sampled_from(["delayed", "bounded"]), st.integers(1, 5), st.integers(1, 40))
def test_rules_with_staleness_0_are_bulk_synchronous(name: str, workers: int, round_: int) -> None:
    rule, default = (
        make_consistency(one, workers) for one in (f"{name}:staleness=0", "bulk_synchronous")
    )
    for one in ("window", "own_rounds", "predicts", "lets_go_ahead", "exchanges_all"):
        assert getattr(rule, one) == getattr(default, one)
    assert rule.needs(round_) == default.needs(round_)


@pytest.mark.parametrize("name", ["delayed", "bounded"])
@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ("staleness=-1", "staleness=-1; it must be a whole number from 0 on"),
        ("staleness=1.5", "staleness=1.5; it must be a whole number from 0 on"),
        (
            "staleness=true",
            "staleness=True; it must be a whole number from 0 on",
        ),
        (
            "staleness=1,predict=often",
            "predict='often'; it must be true, false or damped",
        ),
        ("slack=1", "it takes staleness, predict"),
    ],
)
def test_parameters_that_can_t_be_right_are_refused_and_named(
    name: str, parameters: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{re.escape(why)}"):
        make_consistency(f"{name}:{parameters}", 2)


def test_a_lazy_worker_exchanges_once_in_as_many_steps_as_its_copy_may_be_old() -> None:
    rule = make_consistency("bounded:staleness=3,lazy=1", 2)
    assert rule.local == LocalTraining(4, 1.0, 0.0, False, 0, adds=True)
    assert not rule.own_rounds and rule.needs(7) == 7
    assert make_consistency("bounded:staleness=0,lazy=1", 2).local is None
    for wrong, why in (("lazy=2", "it must be 0 or 1"), ("lazy=1,predict=true", "leave")):
        with pytest.raises(ConfigError, match=why):
            make_consistency(f"bounded:staleness=3,{wrong}", 2)


# A rule by which a worker goes on with an older value.


class Straggling(MemoryJob):
    """A job with a worker that is ahead and a straggler."""

    def __init__(
        self, rule: Union[str, Type[Consistency]] = OneBehind, lets_leave: bool = False
    ) -> None:
        super().__init__(2, 1, SIZE, rule, lets_leave=lets_leave)
        self.keys = self.declare("w", SIZE)
        self.results: List[np.ndarray] = []
        self.ahead, self.behind = self.workers
        self.ahead.call(self.keys[0], INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        self.finish()

    def push(self, rank: int, *rounds: int) -> None:
        """One worker pushes ones, and takes what comes back."""
        for round_ in rounds:
            self.workers[rank].call(self.keys[rank], round_, np.ones(SIZE, np.float32), self._out())
            self.finish()

    def pull(self, round_: int) -> None:
        self.ahead.call(self.keys[0], round_, None, self._out())
        self.finish()

    def _out(self) -> np.ndarray:
        self.results.append(np.full(SIZE, np.nan, np.float32))
        return self.results[-1]


def test_a_worker_is_ahead_of_a_straggler_by_one_round_and_not_by_two() -> None:
    with closing(Straggling()) as job:
        job.push(0, 1, 2)
        assert job.ahead.complete[1:] == [("w", 1)]
        assert np.isnan(job.results[0]).all(), "the weight is not as it was"
        job.push(1, 1)
        assert job.ahead.complete[1:] == [("w", 1), ("w", 2)]
        np.testing.assert_array_equal(job.results[1], 2)
    with closing(Straggling(BulkSynchronous)) as job:
        job.push(0, 1)
        assert job.ahead.complete[1:] == []


def test_a_gradient_that_has_not_left_may_be_overwritten_once_its_worker_goes_on() -> None:
    with closing(Straggling()) as job:
        gradient, weight = np.ones(SIZE, np.float32), np.full(SIZE, 7, np.float32)
        for round_ in (1, 2):
            job.ahead.call(job.keys[0], round_, gradient, weight)
        job.ahead.begin()
        assert job.ahead.complete[1:] == [("w", 1)] and not job.servers[0].most_open()
        gradient[:] = 10
        job.finish()
        assert job.ahead.complete[1:] == [("w", 1)]
        job.push(1, 1, 2)
        np.testing.assert_array_equal(weight, 1 + 1)
        np.testing.assert_array_equal(job.kept(job.keys[0]), 1 + 1 + 10 + 1)


def test_a_worker_that_has_asked_for_no_value_of_the_round_before_waits_for_its_own() -> None:
    with closing(Straggling()) as job:
        job.ahead.call(job.keys[0], 1, np.ones(SIZE, np.float32), None)
        job.push(0, 2)
        job.push(1, 1)
        assert np.isnan(job.results[0]).all()
        job.push(0, 3)
        job.push(1, 2, 3)
        np.testing.assert_array_equal(np.array(job.results)[[0, 2], 0], [4, 4])


# A rule by which a worker waits for others that are too far behind.


def test_a_worker_leads_by_as_many_rounds_as_the_rule_says_and_its_pushes_count_at_once() -> None:
    with closing(Straggling(BOUNDED)) as job:
        job.push(0, 1, 2, 3, 4)
        assert job.ahead.complete[1:] == [("w", 1), ("w", 2)]
        # Round 3 has ended, but worker 1 has made none; round 4 waits for the window.
        np.testing.assert_array_equal(job.kept(job.keys[0]), 3)
        waits = list(job.servers[0].consumer.engine.longest_waits(0.0, time.monotonic()))
        assert [(wait.missing, wait.arrived) for wait in waits] == [([1], [0])]
        job.push(1, 1)
        assert job.ahead.complete[1:] == [("w", 1), ("w", 2), ("w", 3)]
        np.testing.assert_array_equal([result[0] for result in job.results], [1, 2, 4, np.nan, 4])
        np.testing.assert_array_equal(job.kept(job.keys[0]), 5)


def test_nobody_waits_for_a_worker_that_has_left_where_workers_may() -> None:
    for lets_leave in (True, False):
        with closing(Straggling(BOUNDED, lets_leave)) as job:
            job.push(0, 1, 2, 3)
            job.pull(3)
            assert job.ahead.under_way == 2
            job.behind.leave()
            job.finish()
            failures = job.servers[0].failures
            if lets_leave:
                assert job.ahead.under_way == 0 and not failures
                np.testing.assert_array_equal(job.results[-1], 3)
            else:
                assert failures[0].rank == 1 and "worker 0 went on to round" in failures[0].reason


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_the_order_no_worker_leads_by_more_than_the_rule_says(
    seed: int, workers: int, servers: int, whole: bool
) -> None:
    random, rounds = Random(seed), 8
    with closing(MemoryJob(workers, servers, SIZE // 2, BOUNDED)) as job:
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        done = [0] * workers
        results: List[Any] = []
        for round_ in range(1, rounds + 1):
            for rank, worker in enumerate(job.workers):
                target = np.zeros(SIZE, np.float32) if random.random() < 0.8 else None
                worker.call(keys[rank], round_, np.full(SIZE, 16.0**rank, np.float32), target)
                results.append((rank, round_, target))
        moods = Moods(random)
        while events := list(job.events()):
            function, *arguments = moods.choice(events)
            function(*arguments)
            for rank, worker in enumerate(job.workers):
                done[rank] = sum(key == "w" and r > 0 for key, r in worker.complete)
        assert done == [rounds] * workers
        for rank, round_, target in results:
            for element in () if target is None else np.unique(target):
                has = [int(element // 16**one % 16) for one in range(workers)]
                assert has[rank] >= round_ and min(has) >= round_ - STALENESS
        assert set(job.kept(keys[0])) == {sum(rounds * 16.0**one for one in range(workers))}


# A rule by which servers predict.


@pytest.mark.parametrize("codec", ["identity", "float16", "once", "changed"])
def test_pushes_get_the_predicted_value_and_all_else_is_the_true_one(codec: str) -> None:
    choices = CodecChoices(values=Choice(codec))
    job = MemoryJob(2, 2, SIZE // 2, PredictsTwo, optimizer=Momentum, codecs=choices)
    with closing(job):
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.zeros(SIZE, np.float32), None)
        job.finish()
        weight, momentum = np.zeros(SIZE), np.zeros(SIZE)
        for round_ in range(1, 9):
            if round_ == 3:
                # What is predicted is of no slice.
                job.workers[0].tuning.want(SliceSizes(SIZE // 3))
            gradient, targets = np.arange(SIZE) * 2.0**-6, np.full((2, SIZE), np.nan, np.float32)
            for worker, key, target in zip(job.workers, keys, targets):
                worker.call(key, round_, gradient.astype(np.float32), target)
            job.finish()
            momentum = MOMENTUM * momentum - RATE * 2 * gradient
            weight += momentum
            np.testing.assert_allclose(job.kept(keys[0]), weight, rtol=1e-5)
            pulled = np.empty(SIZE, np.float32)
            job.workers[1].call(keys[1], round_, None, pulled)
            job.finish()
            if codec != "changed":
                precision = 2e-3 if codec == "float16" else 1e-5
                np.testing.assert_allclose(targets, [weight + 2 * momentum] * 2, precision)
                np.testing.assert_array_equal(pulled, job.kept(keys[0]))


# A rule by which few pushes are exchanged.


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_what_is_not_exchanged_comes_with_the_next_that_is(dtype: str) -> None:
    with closing(MemoryJob(2, 1, SIZE // 2, EveryFourth, dtype=dtype)) as job:
        keys = job.declare("w", SIZE)
        job.workers[0].call(keys[0], INITIAL_ROUND, np.zeros(SIZE, dtype), None)
        job.finish()
        sent = sum(worker.data_plane.counts["bytes_sent"] for worker in job.workers)
        for push in range(1, 4):
            for key, worker in zip(keys, job.workers):
                assert not key.is_next_exchanged()
                worker.add(key, np.full(SIZE, push, dtype))
        job.finish()
        assert sum(worker.data_plane.counts["bytes_sent"] for worker in job.workers) == sent
        np.testing.assert_array_equal(job.kept(keys[0]), 0)
        target = np.empty(SIZE, dtype)
        assert all(key.is_next_exchanged() for key in keys)
        job.workers[0].call(keys[0], 1, np.full(SIZE, 4, dtype), target)
        job.workers[1].call(keys[1], 1, np.full(SIZE, 4, dtype), None)
        job.finish()
        np.testing.assert_array_equal(target, 2 * (1 + 2 + 3 + 4))
        # What was added is gone.
        for worker, key in zip(job.workers, keys):
            worker.call(key, 2, np.ones(SIZE, dtype), None)
        job.finish()
        np.testing.assert_array_equal(job.kept(keys[0]), 22)


def test_pushes_ahead_are_held_by_the_rule_s_window() -> None:
    with closing(Straggling()) as job:
        job.push(0, *range(1, 7))
        assert job.servers[0].most_open() == OneBehind.window
        job.push(1, 1)
        assert sorted(next(job.servers[0].consumer.engine.records()).rounds.open) == [2, 3, 4]


def test_settings_are_kept_for_a_round_that_has_not_ended_though_its_worker_went_on() -> None:
    with closing(Straggling()) as job:
        job.push(0, 1)
        assert job.ahead.under_way == 0
        for step in (2, 3):
            job.ahead.steps.send_settings(step, b"")
            job.push(0, step)
        assert job.ahead.settings == [(2, 1), (3, 1)]
        job.push(1, 1)
        job.ahead.steps.send_settings(4, b"")
        assert job.ahead.settings[-1] == (4, 2)


def test_slices_that_are_new_answer_at_once_who_needs_the_last_round_of_the_old_size() -> None:
    with closing(Straggling()) as job:
        job.ahead.tuning.want(SliceSizes(SIZE // 3))
        job.push(0, 1, 2, 3)
        job.push(1, 1, 2)
        job.push(0, 4)
        job.pull(4)
        assert job.ahead.sizes.generation(4) == 1 and job.ahead.under_way == 2
        job.push(1, 3)
        # It has the value of round 3. Worker 1 has not pushed for round 4, and a pull waits for it.
        assert job.ahead.under_way == 1
        np.testing.assert_array_equal(job.results[-3], 6)
        job.push(1, 4)
        assert job.ahead.under_way == 0
        np.testing.assert_array_equal(job.results[-3], 8)


def test_rounds_that_wait_name_the_straggler_and_so_does_its_leaving() -> None:
    with closing(Straggling()) as job:
        job.push(0, 1, 2)
        (server,) = job.servers
        waits = list(server.consumer.engine.longest_waits(0.0, time.monotonic()))
        # Round 2 waits, too: of a key's rounds the oldest says who is missing.
        assert [(wait.round, wait.missing, wait.arrived) for wait in waits] == [(1, [1], [0])]
        job.push(1, 1)
        job.behind.servers[0].writer.push(Frame(URGENT, Header(Kind.BYE, 1)))
        job.finish()
        ((failure),) = server.failures
        assert failure.rank == 1 and "worker 0 went on to round 2" in failure.reason


# Whole jobs.


@pytest.mark.parametrize("rule", [{**OWN, **PLUGIN}, {"P3KV_CONSISTENCY": "delayed"}])
def test_a_job_trains_right_with_older_values(tmp_path: Path, rule: Dict[str, str]) -> None:
    """By a rule of the user's own, and by p3kv's."""
    result = run_job("stale.py", [tmp_path], workers=2, servers=2, **rule)
    assert result.code == 0, result.output
    assert result.output.count("every value is the one that the rule names") == 2, result.output
    assert "went on to round 2" in result.said_by("worker 0")


def test_a_worker_that_ends_while_its_last_gradients_are_on_their_way_waits_for_them(
    tmp_path: Path,
) -> None:
    arguments = [tmp_path, "leaves"]
    result = run_job("stale.py", arguments, workers=2, servers=2, **OWN, **PLUGIN)
    assert result.code == 0, result.output


def test_a_job_of_own_rounds_never_leads_by_more_than_its_rule_says() -> None:
    result = run_job("clocks.py", workers=3, servers=2, P3KV_CONSISTENCY=BOUNDED)
    assert result.code == 0, result.output
    for rank in range(3):
        said = result.said_by(f"worker {rank}")
        assert f"worker {rank} led by" in said and "ended with [12, 12, 12]" in said, said
    assert "worker 0 led by 2 " in result.output, result.output


def test_a_job_that_exchanges_every_fourth_push_has_all_of_them_then() -> None:
    """Also where workers of a host send one sum."""
    rule = {"P3KV_CONSISTENCY": "every_fourth", **PLUGIN, "P3KV_PLUGINS": "own_fourth"}
    result = run_on_hosts(2, "clocks.py", workers=2, **rule)
    assert result.code == 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        for step in range(1, 13):
            assert f"step {step} has {[step // 4 * 4] * 2}" in said, said


@pytest.mark.parametrize("per_host", [1, 2])
def test_only_where_hosts_have_several_workers_a_rule_says_that_they_send_no_sum(
    per_host: int,
) -> None:
    result = run_on_hosts(per_host, "clocks.py", workers=2, P3KV_CONSISTENCY=BOUNDED)
    assert result.code == 0, result.output
    assert ("the sum of a host's workers" in result.output) == (per_host == 2), result.output


@pytest.mark.parametrize("lacks_it", ["worker 1", "server 0"])
def test_a_process_that_does_not_know_the_rule_ends_the_job_and_is_named(lacks_it: str) -> None:
    with held_port() as port:
        start = time.monotonic()
        processes = {
            name: start_role(
                name.split()[0], JOIN, port.getsockname()[1], workers=2, **SUMS_ONLY,
                **{f"DMLC_{name[:6].upper()}_ID": name[-1]},
                **(OWN if "worker" in name else {}), **(PLUGIN if name != lacks_it else {}),
            )
            for name in ("scheduler", "server 0", "worker 0", "worker 1")
        }  # fmt: skip
        ended = results(processes, start, timeout_s=DEADLINE_S)
    for name, result in ended.items():
        for word in (
            f"{lacks_it}: there is no consistency 'one_behind', only asynchronous, bounded, ",
            "P3KV_CONSISTENCY", "P3KV_PLUGINS",
        ):  # fmt: skip
            assert word in result.output, f"{name} said {result.output}"
        assert result.code == 1
