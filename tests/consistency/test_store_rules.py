"""A store with a rule of its own, beside others by the job's."""

from __future__ import annotations

from contextlib import closing
from random import Random
from typing import Callable, List, Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.consistency import ASYNCHRONOUS, BulkSynchronous, Delayed, consistency_of_key
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import SliceSizes
from tests.consistency.test_schedules import SIZE, Moods, gradient, values
from tests.frontends.test_torch import job as torch_job
from tests.in_memory import MemoryJob
from tests.jobs import SUMS_ONLY, run_job
from tests.torch_environment import NEEDS_TORCH

STALENESS = 5
RULE = f"delayed:staleness={STALENESS}"
STEPS = 9
LOCAL = "local:steps=2,streaming=false,rate=1,momentum=0"


def test_a_key_has_its_store_s_rule_or_else_the_job_s() -> None:
    job = BulkSynchronous(2)
    assert consistency_of_key(None, job) is job
    assert consistency_of_key(ASYNCHRONOUS, job).own_rounds
    rule = consistency_of_key(RULE, job)
    assert isinstance(rule, Delayed)
    assert (rule.num_workers, rule.needs(9)) == (2, 9 - STALENESS)


@given(st.integers(0, 2**32), st.integers(2, 3), st.integers(1, 2), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_sizes_change_while_a_store_that_comes_later_has_a_wider_window(
    seed: int, workers: int, servers: int, steps_before: int
) -> None:
    """Also where other workers push before they have the initial value."""
    random = Random(seed)
    expected = values(workers, STEPS)
    checks: List[Callable[[], None]] = []
    with closing(MemoryJob(workers, servers, SIZE // 2)) as job:
        first, later = job.declare("first", SIZE), job.declare("later", SIZE, consistency=RULE)
        for rank, worker in enumerate(job.workers):
            if rank == 0:
                worker.call(first[0], INITIAL_ROUND, expected[0].copy(), None)
            for step in range(1, STEPS + 1):
                if rank == 0 and step == steps_before + 1:
                    worker.call(later[0], INITIAL_ROUND, expected[0].copy(), None)
                rounds = {first[rank]: step, later[rank]: step - steps_before}
                for key, round_ in rounds.items():
                    if round_ < 1:
                        continue
                    target = expected[0].copy()
                    worker.call(key, round_, gradient(rank, round_), target)
                    value = expected[max(0, key.consistency.needs(round_))]
                    checks.append(lambda t=target, v=value: np.testing.assert_array_equal(t, v))
        sizes = [SIZE // 5, SIZE, SIZE // 3, SIZE // 2]
        moods = Moods(random)
        while events := list(job.events(3)):
            if sizes and random.random() < 0.05:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            if function == job.workers[0].begin:
                begun = job.workers[0].calls[arguments[0]]
                if (begun.key, begun.round) == (later[0], INITIAL_ROUND):
                    job.workers[0].tuning.widen(begun.key.consistency.window)  # it has the store
            function(*arguments)
        for worker in job.workers:
            assert worker.under_way == 0 and not worker.failures
        for check in checks:
            check()
        np.testing.assert_array_equal(job.kept(first[0]), expected[STEPS])
        np.testing.assert_array_equal(job.kept(later[0]), expected[STEPS - steps_before])


# Whole jobs.


@NEEDS_TORCH
@pytest.mark.parametrize("of_job", [None, pytest.param(LOCAL, marks=pytest.mark.long)])
def test_optimizers_of_one_job_have_rules_of_their_own(of_job: Optional[str]) -> None:
    """Also where servers have imported no framework, by the job's rule."""
    rule = {} if of_job is None else {"P3KV_CONSISTENCY": of_job}
    result = torch_job("torch_store_rules.py", P3KV_SLICE_SIZE=20, **rule)
    assert result.code == 0, result.output
    assert result.output.count("every weight is right by its rule") == 2, result.output


def test_stores_and_trainers_of_one_job_have_rules_of_their_own() -> None:
    result = run_job("store_rules.py", workers=2, servers=2, P3KV_SLICE_SIZE=20)
    assert result.code == 0, result.output
    assert result.output.count("every weight is right by its rule") == 2, result.output


def test_workers_that_disagree_on_a_store_s_rule_all_learn_who_has_which() -> None:
    result = run_job("store_rules.py", ["disagrees"], workers=2, **SUMS_ONLY)
    assert result.code == 1
    for part in ("worker 0", "worker 1", "server 0", "scheduler"):
        said = " ".join(result.said_by(part).split())
        assert "workers disagree on the consistency of key 'w'" in said, result.output
        for rank in range(2):
            assert f"worker {rank} has 'delayed:staleness={rank + 1}'" in said, result.output
