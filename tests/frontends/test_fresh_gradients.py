"""A gradient that nobody has computed since the last step is not used again."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Dict, List, Tuple, Type

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.server.optimizer import Optimizer
from p3kv.wire.fields import PushHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, NO_GRADIENT, Kind
from p3kv.wire.messages import SliceSizes
from p3kv.worker.transfers import Push
from tests.adding import Adding, AddingWhole
from tests.consistency.test_schedules import SIZE, STEPS, Moods, Training, gradient
from tests.jobs import SCRIPTS, JobResult, environment, launch_command, run, run_job
from tests.whole_jobs.test_host_sums import run_on_hosts

TABLES = [
    f"{check}_on_{who}"
    for who in ("servers", "workers")
    for check in ("weights_are_those_of_one_process", "several_devices_have_gradients_or_not")
]
ALL_CHECKS = 18


def look(result: JobResult, folder: Path, workers: int, checks: int) -> None:
    assert result.code == 0, result.output
    for rank in range(workers):
        passed = (folder / f"rank{rank}").read_text().split()
        assert len(passed) == checks, result.output


def test_weights_are_those_of_one_process_whoever_has_gradients(tmp_path: Path) -> None:
    result = run_job("fresh_gradients.py", [tmp_path], 2, 2, timeout_s=120, P3KV_SLICE_SIZE=50)
    look(result, tmp_path, 2, ALL_CHECKS)


def test_workers_of_a_host_sum_what_is_fresh(tmp_path: Path) -> None:
    result = run_on_hosts(2, "fresh_gradients.py", tmp_path, *TABLES, workers=4, P3KV_SLICE_SIZE=50)
    look(result, tmp_path, 4, len(TABLES))


def test_without_a_job_numbers_are_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "fresh_gradients.py"), str(tmp_path)]
    look(run(command, environment(), 120), tmp_path, 1, ALL_CHECKS)


def test_a_job_that_goes_on_from_a_checkpoint_uses_no_gradient_again(tmp_path: Path) -> None:
    command = launch_command("fresh_again.py", ["killed"], workers=2, servers=1)
    command[command.index("--") : command.index("--")] = ["--restarts", "1"]
    folder = {"P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 4}
    result = run(command, environment(**folder), 120)
    assert result.code == 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        # 1 - 0.1 - 0.05 in the first job; 0.05 + 0.05 + 0.1 after it.
        assert f"worker {rank} from 4: seldom is 0.6500" in said, result.output
        assert f"worker {rank} from 4: always is 0.2000" in said, result.output


def test_those_that_are_left_go_on_with_the_gradients_that_they_have(tmp_path: Path) -> None:
    leave = {"P3KV_LET_WORKERS_LEAVE": 1}
    result = run_job("fresh_again.py", ["left"], workers=2, servers=1, timeout_s=60, **leave)
    assert result.code == 0, result.output
    said = result.said_by("worker 0")
    # Steps 0 and 2 together, then worker 0 alone: its gradients of steps 6 and 7.
    assert "worker 0 from 0: seldom is 0.7500" in said, result.output
    assert "worker 0 from 0: always is 0.4500" in said, result.output


@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([Adding, AddingWhole]),
)
@settings(max_examples=80, deadline=None)
def test_results_are_right_whatever_the_order_of_events(
    seed: int, workers: int, servers: int, per_host: int, optimizer: Type[Optimizer]
) -> None:
    random = Random(seed)
    fresh = [[random.random() < 0.5 for _ in range(workers)] for _ in range(STEPS + 1)]
    value = np.ones(SIZE, np.float32)
    expected = [value]
    for round_ in range(1, STEPS + 1):
        given_ = [gradient(rank, round_) for rank in range(workers) if fresh[round_][rank]]
        if given_:
            total = np.sum(given_, axis=0)
            value = value + total + (total.max() if optimizer.whole_tensors else 0)
        expected.append(value)
    targets: List[Tuple[int, np.ndarray]] = []
    told: Dict[Tuple[int, int], Future] = {}
    with closing(Training(workers, servers, optimizer=optimizer, per_host=per_host)) as job:
        keys = job.keys["often"]
        job.workers[0].call(keys[0], INITIAL_ROUND, expected[0].copy(), None)
        for rank, worker in enumerate(job.workers):
            for round_ in range(1, STEPS + 1):
                target = np.full(SIZE, np.nan, np.float32) if random.random() < 0.5 else None
                worker.call(keys[rank], round_, gradient(rank, round_), target)
                if target is not None:
                    targets.append((round_, target))
                if not fresh[round_][rank]:
                    push = worker.calls[-1]
                    assert isinstance(push, Push)
                    push.changes = told[rank, round_] = Future()
                    push.has_gradient = False
        sizes, moods = [SIZE // 5, SIZE, SIZE // 3], Moods(random)
        while events := list(job.events(3)):
            if sizes and random.random() < 0.02:
                job.workers[0].tuning.want(SliceSizes(sizes.pop()))
            function, *arguments = moods.choice(events)
            function(*arguments)
        for worker in job.workers:
            assert worker.under_way == 0
            assert not worker.failures
        for (_, round_), changes in told.items():
            assert changes.result(0) == any(fresh[round_])
        np.testing.assert_array_equal(job.kept(keys[0]), expected[-1])
        for round_, target in targets:
            np.testing.assert_array_equal(target, expected[round_])


@pytest.mark.parametrize(
    ("round_", "payload", "refusal"),
    [(1, b"1234", "4 bytes for .* without a gradient"), (INITIAL_ROUND, b"", "no initial value")],
)
def test_a_server_refuses_what_can_t_be_without_a_gradient(
    round_: int, payload: bytes, refusal: str
) -> None:
    with closing(Training(2, 1)) as job:
        key, worker = job.keys["often"][0], job.workers[0]
        if round_:
            worker.call(key, INITIAL_ROUND, np.ones(SIZE, np.float32), None)
            job.finish()
        header = PushHeader(Kind.PUSH, 0, NO_GRADIENT, key=key.key_id, round=round_, step=round_)
        worker.servers[0].writer.push(Frame(0, header, memoryview(payload)))
        with pytest.raises(Exception, match=refusal):
            job.finish()
