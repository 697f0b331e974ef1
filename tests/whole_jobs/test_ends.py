"""A worker ends when its script does, also while backward still runs."""

from __future__ import annotations

import sys
import time
from typing import Dict

import pytest

from tests.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SUMS_ONLY,
    JobResult,
    end,
    held_port,
    results,
    start_role,
)


def run_by_hand(how: str, steps: int) -> Dict[str, JobResult]:
    """The job of `ends.py` in processes that nobody supervises."""
    command = [sys.executable, str(SCRIPTS / "ends.py"), how, str(steps)]
    start = time.monotonic()
    with held_port() as holder:
        port = holder.getsockname()[1]
        processes = {
            "scheduler": start_role("scheduler", command, port, workers=2),
            "server 0": start_role("server", command, port, workers=2, **SUMS_ONLY),
            **{
                f"worker {rank}": start_role("worker", command, port, 2, DMLC_WORKER_ID=rank)
                for rank in range(2)
            },
        }
        try:
            return results(processes, start, timeout_s=DEADLINE_S)
        finally:
            for process in processes.values():
                end(process)


@pytest.mark.parametrize(
    ("how", "cause"),
    [("raise", "ValueError: there is no such label"), ("interrupt", "KeyboardInterrupt")],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_script_that_ends_badly_while_backward_runs_ends_its_process_and_the_job(
    how: str, cause: str, steps: int
) -> None:
    ended = run_by_hand(how, steps)
    for name, result in ended.items():
        assert result.code != 0, f"{name}: {result.output}"
        if name != "worker 1":
            assert f"its script ended with {cause}" in result.output, f"{name}: {result.output}"


def test_a_script_that_ends_well_while_backward_runs_leaves_when_all_is_sent() -> None:
    ended = run_by_hand("return", 2)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
        assert name[:6] != "worker" or "all is here" in result.output
