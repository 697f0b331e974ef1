"""Children of a script: those to which their environment gives ranks are workers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from tests.frontends.test_torch import job
from tests.jobs import (
    DEADLINE_S,
    SCRIPTS,
    SUMS_ONLY,
    JobResult,
    end,
    environment,
    eventually,
    held_port,
    output_of,
    run,
)
from tests.torch_environment import NEEDS_TORCH, PYTHON

TIMEOUT_S = 120.0
pytestmark = NEEDS_TORCH


def script(*arguments: object) -> JobResult:
    command: List[str] = [str(PYTHON), str(SCRIPTS / "torch_children.py"), *map(str, arguments)]
    return run(command, environment(), TIMEOUT_S)


def test_children_to_which_a_script_gives_ranks_are_workers_of_one_job() -> None:
    """p3kv was imported before they had ranks; one makes its optimizer in a thread that ends."""
    with held_port() as holder:
        result = script("spawn", holder.getsockname()[1])
    assert result.code == 0, result.output
    for rank in range(2):
        assert f"{rank} of 2 has -3.0" in result.output, result.output


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_may_wait_for_the_end_of_another_that_it_has_started(rank: int) -> None:
    """Also if servers and the scheduler run beside the other one."""
    outputs = []
    for module in ([], ["-m", "p3kv.ddp"]):
        with held_port() as holder:
            port = holder.getsockname()[1]
            command = [
                str(PYTHON),
                *module,
                str(SCRIPTS / "torch_launching.py"),
                str(rank),
                str(port),
            ]
            result = run(command, environment(P3KV_SECRET=""), TIMEOUT_S)
        assert result.code == 0 and "the other ended with 0" in result.output, result.output
        outputs.append(sorted(re.findall(r"rank \d: \S+", result.output)))
    assert len(outputs[0]) == 2 and outputs[0] == outputs[1]


def test_children_make_mxnets_store_as_workers_or_not_at_all() -> None:
    with held_port() as holder:
        port = str(holder.getsockname()[1])
        command = [sys.executable, str(SCRIPTS / "children.py"), port]
        result = run(command, environment(**SUMS_ONLY), TIMEOUT_S)
    assert "exit codes 0 0 1" in result.output, result.output
    for rank in range(2):
        assert f"{rank} of 2 has 3.0" in result.output, result.output
    assert "nothing says which of how many workers it is" in result.output, result.output


def test_functions_that_torchruns_api_runs_are_workers_and_tell_why_they_fail() -> None:
    result = script("elastic")
    assert result.code == 1
    for rank in range(2):
        assert f"{rank} of 2 has -1.5" in result.output, result.output
    cause = "worker 1 (round 1): its script ended with ValueError: boom"
    assert f"p3kv scheduler: {cause}" in result.output, result.output
    assert "p3kv server: " not in result.output, result.output


def test_what_runs_beside_a_rank_serves_its_script_when_torchrun_gets_sigterm(
    tmp_path: Path,
) -> None:
    command = [str(PYTHON.parent / "torchrun"), "--nproc-per-node", "2"]
    torchrun = subprocess.Popen(
        [*command, str(SCRIPTS / "torch_children.py"), "saves", str(tmp_path), "test"],
        env=environment(P3KV_LET_WORKERS_LEAVE=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        torchrun.send_signal(signal.SIGTERM)
        output = output_of(torchrun, DEADLINE_S)
    finally:
        end(torchrun)
    assert output is not None and {"0 saved", "1 saved"} <= {*output.splitlines()}, output


def test_a_script_may_have_a_process_group_of_its_own_under_the_launcher() -> None:
    result = job("torch_children.py", "group", workers=2, servers=1)
    assert result.code == 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        assert f"all ranks: 3.0; {rank} of 2 has -3.0" in said, result.output


def test_all_save_though_one_is_in_the_next_step_when_the_launcher_gets_sigterm(
    tmp_path: Path,
) -> None:
    result = job("torch_children.py", "saves", tmp_path, "worker", workers=2, servers=2)
    assert result.code == 128 + signal.SIGTERM, result.output
    for rank in range(2):
        assert f"{rank} saved" in result.said_by(f"worker {rank}"), result.output


def test_a_child_without_a_rank_is_refused_and_told_what_to_set() -> None:
    result = script("no rank")
    assert result.code == 0, result.output
    assert "which of how many workers it is. Set RANK, WORLD_SIZE" in result.output


def test_a_workers_children_are_refused_and_disturb_nothing() -> None:
    """Spawned, forked, and other programs; a data loader's may be there, and what trains alone."""
    result = job("torch_children.py", "children", workers=1, servers=1)
    assert result.code == 0, result.output
    assert result.output.count("is a child of worker 0 of a job (process ") == 3, result.output
    assert "alone: 0 of 1 has -2.0" in result.output
    assert "worker 0  | 0 of 1 has -2.0" in result.output
