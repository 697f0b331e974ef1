"""A worker ends when its script does, also while backward still runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Dict

import pytest

from tests.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SUMS_ONLY,
    JobResult,
    end,
    environment,
    held_port,
    launch_command,
    results,
    start_role,
)
from tests.torch_environment import NEEDS_TORCH, PYTHON


def run_by_hand(script: str, *arguments: object) -> Dict[str, JobResult]:
    """A job of two workers in processes that nobody supervises."""
    python = PYTHON if script.startswith("torch") else sys.executable
    command = [python, str(SCRIPTS / script), *map(str, arguments)]
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
    [
        ("raise", "ValueError: there is no such label"),
        ("interrupt", "KeyboardInterrupt"),
        ("interrupt_in_del", "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_script_that_ends_badly_while_backward_runs_ends_its_process_and_the_job(
    how: str, cause: str, steps: int
) -> None:
    ended = run_by_hand("ends.py", how, steps)
    for name, result in ended.items():
        assert result.code != 0, f"{name}: {result.output}"
        assert "Exception ignored" not in result.output, f"{name}: {result.output}"
        if name != "worker 1":
            assert f"its script ended with {cause}" in result.output, f"{name}: {result.output}"


def test_a_script_that_ends_well_while_backward_runs_leaves_when_all_is_sent() -> None:
    ended = run_by_hand("ends.py", "return", 2)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
        assert name[:6] != "worker" or "all is here" in result.output


@pytest.mark.parametrize("script", ["ends.py", pytest.param("torch_ends.py", marks=NEEDS_TORCH)])
def test_a_script_that_is_over_while_its_last_step_fails_for_another_says_so(
    script: str, tmp_path: Path
) -> None:
    ended = run_by_hand(script, "other", 2, tmp_path)
    for name, result in ended.items():
        assert result.code == 1, f"{name}: {result.output}"
        assert "ValueError: there is no such label" in result.output, f"{name}: {result.output}"
    assert "trained" in ended["worker 1"].output


@pytest.mark.alone
def test_a_job_is_over_soon_after_its_last_worker_has_ended() -> None:
    """No process waits for an answer of one that has ended."""
    took_s = []
    for _ in range(3):
        launcher = subprocess.Popen(
            launch_command("join.py", [], 2, 4),
            env=environment(**SUMS_ONLY),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert launcher.stdout is not None
        with launcher.stdout:
            said = [launcher.stdout.readline() for _ in range(2)]
            last = time.monotonic()
            assert launcher.wait(DEADLINE_S) == 0
        took_s.append(time.monotonic() - last)
        assert all("has joined" in line for line in said)
    print(f"over after {', '.join(f'{one:.2f}' for one in took_s)} s")
    assert min(took_s) < 2.0
