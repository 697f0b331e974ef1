"""`p3kv launch --restarts`: a job that fails is started again and goes on from its checkpoint."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import List

import pytest

from p3kv.processes.launcher.launch import JobEnd, run_with_restarts
from tests.jobs import DEADLINE_S, environment

FAILED, STOPPED, WELL = JobEnd(3, True), JobEnd(130, False), JobEnd(0, False)


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "resumed"),
    [
        ([WELL], 2, 0, [False]),
        ([FAILED], 0, 3, [False]),
        ([FAILED, WELL], 2, 0, [False, True]),
        ([FAILED, FAILED, FAILED], 2, 3, [False, True, True]),
        ([FAILED, STOPPED], 2, 130, [False, True]),
        ([STOPPED], 2, 130, [False]),
    ],
)
def test_a_failed_job_starts_again_so_often_but_not_one_that_was_stopped(
    ends: List[JobEnd], restarts: int, code: int, resumed: List[bool]
) -> None:
    left, resumes, said = list(ends), [], io.BytesIO()

    def once(resume: bool) -> JobEnd:
        resumes.append(resume)
        return left.pop(0)

    assert run_with_restarts(once, restarts, False, said) == code
    assert resumes == resumed
    assert len(said.getvalue().splitlines()) == len(resumed) - 1


@pytest.mark.parametrize("option", [["--resume"], ["--restarts", "2"]])
def test_without_a_folder_for_checkpoints_the_launcher_says_so(option: List[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "p3kv", "launch", "-n", "1", *option, "--", "true"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE_S,
        text=True,
    )
    assert result.returncode == 2
    assert "P3KV_CHECKPOINT_DIR" in result.stdout


def test_a_number_of_restarts_below_0_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "p3kv", "launch", "-n", "1", "--restarts", "-1", "--", "true"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=DEADLINE_S,
        text=True,
    )
    assert result.returncode == 2
    assert "-1 is not 0 or more" in result.stdout
