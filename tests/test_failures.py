"""When a process of a job dies or fails, all others soon end and say which one, and where."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict

import psutil
import pytest

from tests.jobs import (
    SCRIPTS,
    JobResult,
    TrainingJob,
    connections_of,
    end,
    eventually,
    held_port,
    results,
    run_job,
    start_role,
)

PROMISED_S = 10.0
KILLED = 128 + 9


@pytest.mark.parametrize("victim", ["worker 1", "server 1", "scheduler"])
def test_a_process_killed_in_mid_training_is_named_by_all_others_which_end_within_10_s(
    tmp_path: Path, victim: str
) -> None:
    with TrainingJob(tmp_path, workers=2, servers=2) as job:
        job.wait_until_training()
        parts = job.parts()
        assert len(parts) == 5
        parts[victim].kill()
        killed_at = time.monotonic()
        _, alive = psutil.wait_procs(parts.values(), timeout=PROMISED_S)
        assert not alive, job.output()
        took_s = time.monotonic() - killed_at
        result = job.result(timeout_s=5.0)
    print(f"all ended {took_s:.1f} s after {victim} was killed")
    for name in parts.keys() - {victim}:
        said = result.said_by(name)
        assert re.search(rf"{victim} \(round \d+\): ", said), f"{name} said:\n{result.output}"
    assert result.code == KILLED
    assert f"p3kv launch: {victim} failed first: killed by SIGKILL" in result.output


def start_all_but_one_worker(port: int) -> Dict[str, subprocess.Popen]:
    """A job of two workers and one server, of which worker 0 has not come."""
    command = [sys.executable, str(SCRIPTS / "join.py")]
    return {
        "scheduler": start_role("scheduler", command, port, workers=2),
        "server 0": start_role("server", command, port, workers=2, DMLC_SERVER_ID=0),
        "worker 1": start_role("worker", command, port, workers=2, DMLC_WORKER_ID=1),
    }


@pytest.mark.parametrize("victim", ["worker 1", "server 0", "scheduler"])
def test_a_process_killed_during_the_rendezvous_is_named_by_all_others_which_end_within_10_s(
    victim: str,
) -> None:
    with held_port() as port:
        processes = start_all_but_one_worker(port.getsockname()[1])
        try:
            scheduler = processes["scheduler"].pid
            eventually(lambda: len(connections_of(scheduler, psutil.CONN_ESTABLISHED)) == 2)
            processes[victim].kill()
            ended = results(processes, time.monotonic(), timeout_s=PROMISED_S)
        finally:
            for process in processes.values():
                end(process)
    for name in processes.keys() - {victim}:
        assert f"{victim}: " in ended[name].output, f"{name} said:\n{ended[name].output}"
        assert ended[name].code == 1
    print({name: f"{one.seconds:.1f} s" for name, one in ended.items()})


def fail(folder: Path, how: str) -> JobResult:
    """Worker 1 goes wrong in step 20; everybody has ended within the promised time."""
    with TrainingJob(folder, workers=2, servers=1, wrong=(1, 20, how)) as job:
        job.wait_until_training()
        start = time.monotonic()
        result = job.result(PROMISED_S)
        print(f"all ended {time.monotonic() - start:.1f} s after the training was warm")
    return result


def test_a_script_that_raises_ends_the_job_with_its_exception_on_every_side(
    tmp_path: Path,
) -> None:
    result = fail(tmp_path, "raise")
    reason = r"worker 1 \(round 19\): its script ended with ValueError: there is no such label"
    for name in ("worker 0", "server 0", "scheduler"):
        assert re.search(reason, result.said_by(name)), result.output
    assert "ValueError: there is no such label" in result.said_by("worker 1")
    assert result.code == 1
    assert "p3kv launch: worker 1 failed first: exit code 1" in result.output


@pytest.mark.parametrize(
    ("how", "code", "verdict"),
    [
        ("leave", 1, "worker 1 left first, with exit code 0, while others needed it"),
        ("exit", 3, "worker 1 failed first: exit code 3"),
    ],
)
def test_a_worker_that_makes_fewer_steps_than_the_others_is_named_with_the_remedy(
    tmp_path: Path, how: str, code: int, verdict: str
) -> None:
    result = fail(tmp_path, how)
    reason = r"worker 1 \(round 19\): it ended in order, but worker 0 went on to round 20"
    for name in ("worker 0", "server 0", "scheduler"):
        said = result.said_by(name)
        assert re.search(reason, said), result.output
        assert "give each the same number of batches" in said
    assert result.code == code
    assert f"p3kv launch: {verdict}" in result.output


def test_a_worker_that_can_t_begin_to_send_fails_and_everybody_learns_why() -> None:
    result = run_job("no_memory.py", workers=2, servers=1)
    print(f"all ended after {result.seconds:.1f} s")
    reason = "Failed to allocate CPU Memory"
    for name in ("worker 0", "worker 1", "server 0", "scheduler"):
        said = result.said_by(name)
        assert re.search(f"worker 1: p3kv failed in the worker: .*{reason}", said), result.output
    assert "p3kv launch: worker 1 failed first: exit code 1" in result.output
