"""The store as MXNet's users meet it: KVStore's calls, gluon's Trainer, Module, optimizers.

Each worker script checks itself against a computation of its own, bit for bit, and many checks
share one job, whose start is what takes the time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Callable, Dict, Sequence, Tuple

import pytest

from tests.jobs import SCRIPTS, run_job

sys.path.insert(0, str(SCRIPTS))
import mixed_precision
import module
import optimizers
import store_api
import trainer
import uses

SERVERS = 2
OWN_OPTIMIZERS = {
    "P3KV_OPTIMIZERS": "own_mxnet_optimizers",
}


class Checked:
    """What a job of checks has left: its output, and the names that each worker has passed."""

    def __init__(self, folder: Path, script: str, arguments: Sequence[str], workers: int,
                 slice_size: int, **settings: object) -> None:  # fmt: skip
        self._code = -1
        try:
            result = run_job(
                script, [folder, *arguments], workers, SERVERS, P3KV_SLICE_SIZE=slice_size,
                **settings,
            )  # fmt: skip
            self._output, self._code = result.output, result.code
        except AssertionError as no_end:  # kept: not every check shall wait for it once more
            self._output = str(no_end)
        self._passed = [
            path.read_text().split() if path.exists() else []
            for path in (folder / f"rank{rank}" for rank in range(workers))
        ]

    def passed(self, check: str) -> None:
        """Fails, with the job's output, unless all workers have passed."""
        assert all(check in passed for passed in self._passed), self._output

    def ended_well(self) -> None:
        """Fails unless the job ended in order."""
        assert self._code == 0, self._output


Run = Callable[..., Checked]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a job of checks, the same one only once."""
    jobs: Dict[Tuple, Checked] = {}

    def run_once(
        script: str, *arguments: str, workers: int = 2, slice_size: int = 500, **settings: object
    ) -> Checked:
        job = (script, arguments, workers, slice_size, *sorted(settings.items()))
        if job not in jobs:
            folder = tmp_path_factory.mktemp("checks")
            jobs[job] = Checked(folder, script, arguments, workers, slice_size, **settings)
        return jobs[job]

    return run_once


def names(checks: Sequence[Callable]) -> list:
    return [check.__name__ for check in checks]


@pytest.mark.parametrize("check", [*names(store_api.CHECKS), "ended_well"])
def test_kvstore_calls(run: Run, check: str) -> None:
    look(run("store_api.py", slice_size=5000), check)


@pytest.mark.parametrize("check", [*names(uses.CHECKS), "ended_well"])
def test_uses_of_the_store(run: Run, check: str) -> None:
    look(run("uses.py", slice_size=100), check)


def test_a_worker_that_comes_late_to_the_servers_learns_what_they_have_told_the_others(
    run: Run,
) -> None:
    run("welcomed_late.py", slice_size=100).ended_well()


@pytest.mark.parametrize("check", [*names(optimizers.CHECKS), "ended_well"])
def test_servers_update_as_mxnet_s_updater_does(run: Run, check: str) -> None:
    look(run("optimizers.py", workers=1, slice_size=100, **OWN_OPTIMIZERS), check)


@pytest.mark.parametrize("check", [*trainer.CHECKS, "ended_well"])
def test_trainer(run: Run, check: str) -> None:
    look(run("trainer.py"), check)


@pytest.mark.parametrize("check", [*names(mixed_precision.CHECKS), "ended_well"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_precision(run: Run, dtype: str, check: str) -> None:
    problem = mixed_precision.why_no_bfloat16() if dtype == "bfloat16" else None
    if problem is not None:
        pytest.skip(f"MXNet can't compute in bfloat16 on this processor: {problem}")
    look(run("mixed_precision.py", dtype, slice_size=100), check)


@pytest.mark.parametrize("check", [*module.CHECKS, "ended_well"])
@pytest.mark.parametrize("update_on_kvstore", [1, 0], ids=["servers", "workers"])
def test_module(run: Run, update_on_kvstore: int, check: str) -> None:
    look(run("module.py", MXNET_UPDATE_ON_KVSTORE=update_on_kvstore), check)


def look(job: Checked, check: str) -> None:
    job.ended_well() if check == "ended_well" else job.passed(check)


def test_trainers_that_nobody_has_any_more_are_forgotten_by_workers_and_servers() -> None:
    """Each has 16 MB of weights, and twice as much of states."""
    result = run_job("folds.py", workers=2)
    assert result.code == 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        used = [tuple(map(int, one)) for one in re.findall(r"used (\d+) (\d+)", said)]
        assert len(used) == 6, result.output
        for at in range(2):
            assert min(one[at] for one in used[3:]) - min(one[at] for one in used[:3]) < 80, used
