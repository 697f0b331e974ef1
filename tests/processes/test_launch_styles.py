"""A job may be started in all the ways in which MXNet's users start theirs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

from tests.jobs import DEADLINE_S, SCRIPTS, JobResult, end, held_port, results, start_role

sys.path.insert(0, str(SCRIPTS))
import exact_model

WORKERS = SERVERS = 2


def run_in_every_role(command: List[str]) -> Dict[str, JobResult]:
    """What MXNet's own `launch.py --launcher local` does: the same command in every role.

    The tracker numbers workers and servers in one row, and tells a process nothing but DMLC_*.
    """
    roles = ["worker"] * WORKERS + ["server"] * SERVERS
    start = time.monotonic()
    with held_port() as holder:
        port = holder.getsockname()[1]
        processes: Dict[str, subprocess.Popen] = {
            "scheduler": start_role("scheduler", command, port, WORKERS, SERVERS),
            **{
                f"{role} {task}": start_role(
                    role, command, port, WORKERS, SERVERS,
                    DMLC_TASK_ID=task, DMLC_JOB_CLUSTER="local",
                )
                for task, role in enumerate(roles)
            },
        }  # fmt: skip
        try:
            return results(processes, start, timeout_s=DEADLINE_S)
        finally:
            for process in processes.values():
                end(process)


def test_the_users_script_in_every_role_with_p3kv_as_its_first_import(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "exact.py"), str(tmp_path), "sgd-servers"]
    ended = run_in_every_role(command)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
    exact_model.assert_trained_as_by_one_process(exact_model.saved(tmp_path, "sgd-servers"), "sgd")


def test_a_script_that_does_not_know_p3kv_runs_in_every_role_with_p3kv_run() -> None:
    command = [sys.executable, "-m", "p3kv", "run", str(SCRIPTS / "unaware.py")]
    ended = run_in_every_role(command)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"
    # From 1, two steps of two workers whose gradients are 1, divided by a batch of 1.
    for rank in range(WORKERS):
        assert re.search(r"weights \[(-3\.0(, )?){6}\]", ended[f"worker {rank}"].output)
    for task in range(SERVERS):
        assert "weights" not in ended[f"server {WORKERS + task}"].output
