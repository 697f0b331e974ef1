"""When rounds end and workers go on: a rule that users choose and extend."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, List, Type

import numpy as np
import pytest

from p3kv.consistency import CONSISTENCIES, BulkSynchronous, Consistency, make_consistency
from p3kv.errors import ConfigError
from p3kv.server.engine import Engine
from p3kv.server.engine.buffers import BufferPool
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, URGENT, Kind, pack_header
from p3kv.wire.messages import DeclaredKey, JobSettings, Terms
from tests.engines import Result, one_slice, with_values
from tests.in_memory import Adding, Job
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    ROOT,
    SCRIPTS,
    SUMS_ONLY,
    held_port,
    results,
    run_job,
    start_role,
)

sys.path.insert(0, str(SCRIPTS))
from own_consistency import OneBehind

SIZE = 12
OWN = {"P3KV_CONSISTENCY": "one_behind"}
PLUGIN = {"P3KV_PLUGINS": "own_consistency", "PYTHONPATH": f"{ROOT}:{SCRIPTS}"}


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
    assert [rule.missing(arrived) for arrived in ([], [1], [2, 0, 1])] == [[0, 1, 2], [0, 2], []]
    assert [rule.ends(arrived) for arrived in ([], [0, 2], [2, 0, 1])] == [False, False, True]


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
        (own(window=2.5), "window of 2.5"),
        (own(needs=Consistency.needs, __abstractmethods__={"needs"}), "failed: TypeError"),
    ],
    ids=["late", "constant", "half", "raises", "no window", "no number", "abstract"],
)
def test_a_rule_that_can_t_be_right_is_refused_and_named(
    register: Any, rule: Type[Consistency], why: str
) -> None:
    register("own", rule)
    with pytest.raises(ConfigError, match=rf"the consistency 'own' .*{why}"):
        make_consistency("own", 2)


# A rule by which a worker goes on with an older value.


class Slice:
    """One slice of an aggregator with a rule by which workers may be one round behind."""

    def __init__(self, updates: bool = True) -> None:
        self._pool = BufferPool()
        self.engine = Engine(OneBehind(2), self._pool)
        if updates:
            self.engine.set_optimizer(0, Adding())
        self.state = one_slice(self.engine, DeclaredKey(0, "w", (SIZE,), "float32", [(0, SIZE)]))
        self.push(0, INITIAL_ROUND, wants=False)

    def push(self, rank: int, round: int, wants: bool = True) -> List[Result]:
        """Pushes ones; returns all results that follow."""
        gradient = self._pool.get(SIZE, np.dtype(np.float32))
        gradient.array[:] = 1
        self.engine.push(self.state, rank, round, gradient, wants, 0, round)
        ended = list(with_values(self.engine.end_rounds(self.state)))
        return ended + list(with_values(self.engine.early_results(self.state)))


def told(results: List[Result]) -> List[tuple]:
    return [(one.round, one.wanting, one.others) for one in results]


def test_a_worker_goes_on_at_once_with_a_value_that_is_new_enough() -> None:
    slice_ = Slice()
    (early,) = slice_.push(0, 1)
    assert told([early]) == [(1, [0], [])]
    np.testing.assert_array_equal(early.value.array, 1)
    assert slice_.push(0, 2) == []  # it needs round 1
    ended, early = slice_.push(1, 1)
    # The straggler gets the new value. Both learn that the round has ended.
    assert told([ended, early]) == [(1, [1], [0, 1]), (2, [0], [])]
    np.testing.assert_array_equal(early.value.array, 3)
    assert told(slice_.push(1, 2)) == [(2, [1], [0, 1])]
    assert not slice_.state.ledger.open and not slice_.state.early_rounds


def test_without_an_optimizer_workers_wait_for_the_sum_of_their_own_round() -> None:
    slice_ = Slice(updates=False)
    assert slice_.push(0, 1) == slice_.push(0, 2) == []
    assert told(slice_.push(1, 1)) == [(1, [0, 1], [0, 1])]
    assert told(slice_.push(1, 2)) == [(2, [0, 1], [0, 1])]


class Straggling(Job):
    """A job with a worker that is ahead and a straggler."""

    def __init__(self, rule: Type[Consistency] = OneBehind) -> None:
        super().__init__(2, 1, SIZE, rule)
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
        np.testing.assert_array_equal(job.results[0], 0)
        job.push(1, 1)
        assert job.ahead.complete[1:] == [("w", 1), ("w", 2)]
        np.testing.assert_array_equal(job.results[1:], 2)
    with closing(Straggling(BulkSynchronous)) as job:
        job.push(0, 1)
        assert job.ahead.complete[1:] == []


def test_pushes_ahead_are_held_by_the_rule_s_window() -> None:
    with closing(Straggling()) as job:
        job.push(0, *range(1, 7))
        assert job.servers[0].most_open() == OneBehind.window
        job.push(1, 1)
        assert sorted(next(job.servers[0].consumer.engine.units()).ledger.open) == [2, 3, 4]


def test_settings_are_kept_for_a_round_that_has_not_ended_though_its_worker_went_on() -> None:
    with closing(Straggling()) as job:
        job.push(0, 1)
        assert job.ahead.under_way == 0
        for step in (2, 3):
            job.ahead.steps.settings(step, b"")
            job.push(0, step)
        assert job.ahead.settings == [(2, 1), (3, 1)]
        job.push(1, 1)
        job.ahead.steps.settings(4, b"")
        assert job.ahead.settings[-1] == (4, 2)


def test_slices_that_are_new_answer_at_once_who_needs_the_last_round_of_the_old_size() -> None:
    with closing(Straggling()) as job:
        job.ahead.tuning.want(Terms(SIZE // 3))
        job.push(0, 1, 2, 3)
        job.push(1, 1, 2)
        job.push(0, 4)
        job.pull(4)
        assert job.ahead.terms.generation(4) == 1 and job.ahead.under_way == 2
        job.push(1, 3)
        assert job.ahead.under_way == 0
        # It has the value of round 3. Worker 1 has not pushed for round 4.
        np.testing.assert_array_equal(job.results[-3:], 6)


def test_rounds_that_wait_name_the_straggler_and_so_does_its_leaving() -> None:
    with closing(Straggling()) as job:
        job.push(0, 1, 2)
        (server,) = job.servers
        waits = list(server.consumer.waiting.longer_than(0.0, time.monotonic()))
        # Round 2 waits, too: of a key's rounds the oldest says who is missing.
        assert [(wait.round, wait.missing, wait.arrived) for wait in waits] == [(1, [1], [0])]
        job.push(1, 1)
        job.behind.servers[0].writer.push(Frame(URGENT, pack_header(Kind.BYE, 1)))
        job.finish()
        ((failure),) = server.failures
        assert failure.rank == 1 and "worker 0 went on to round 2" in failure.reason


# Whole jobs.


def test_a_job_trains_right_by_a_rule_of_the_user_s_own(tmp_path: Path) -> None:
    result = run_job("stale.py", [tmp_path], workers=2, servers=2, **OWN, **PLUGIN)
    assert result.code == 0, result.output
    assert result.output.count("every value is one that the rule allows") == 2, result.output
    assert "went on to round 2" in result.said_by("worker 0")


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
            f"{lacks_it}: there is no consistency 'one_behind', only asynchronous, bulk_",
            "P3KV_CONSISTENCY", "P3KV_PLUGINS",
        ):  # fmt: skip
            assert word in result.output, f"{name} said {result.output}"
        assert result.code == 1
