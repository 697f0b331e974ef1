"""The folder of checkpoints: said at the start, and one and the same for all that use it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Dict, List

import pytest

from p3kv.checkpoints import marks
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    SCRIPTS,
    SUMS_ONLY,
    JobResult,
    held_port,
    results,
    run_job,
    start_role,
)

ELSEWHERE = "127.0.0.2"
"""The address of the server that is on another host."""


def apart(other: Path, at: Path, command: List[str]) -> List[str]:
    """A command that sees the folder `other` at the place of `at`."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mounting = 'mount --bind "$0" "$1" && shift && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounting, str(other), str(at), *command]


def joined(folder: Path, other: Path, at: Path) -> Dict[str, JobResult]:
    """How the processes of a job with two servers end that do nothing but join. Server 1 has the
    address `ELSEWHERE`, and sees the folder `other` at the place of `at`."""
    far = apart(other, at, JOIN)
    with held_port() as holder:
        port, since = holder.getsockname()[1], time.monotonic()
        here = {"P3KV_CHECKPOINT_DIR": folder, **SUMS_ONLY}
        there = {"DMLC_NODE_HOST": ELSEWHERE, "DMLC_SERVER_ID": 1}
        started = {
            "scheduler": start_role("scheduler", JOIN, port, servers=2),
            "server 0": start_role("server", JOIN, port, servers=2, DMLC_SERVER_ID=0, **here),
            "server 1": start_role("server", far, port, servers=2, **there, **here),
            "worker 0": start_role("worker", JOIN, port, servers=2, **here),
        }
        return results(started, since, DEADLINE_S)


def refused(ended: Dict[str, JobResult], reason: str) -> None:
    for name in ("server 0", "server 1", "worker 0"):
        assert ended[name].code != 0
        assert reason in ended[name].output, ended[name].output
    assert "has joined" not in ended["worker 0"].output


def test_a_server_with_a_folder_of_its_own_at_the_same_path_is_named_before_training(
    tmp_path: Path,
) -> None:
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    ended = joined(folder, other, folder)
    refused(
        ended,
        f"worker 0 on host 127.0.0.1 can't use what is written to {folder} by server 1 on host "
        f"{ELSEWHERE}: its files are not there. Set P3KV_CHECKPOINT_DIR",
    )
    assert os.listdir(folder) == os.listdir(other) == []


def test_a_server_that_does_not_see_the_folder_is_named_before_training(tmp_path: Path) -> None:
    folder, other = tmp_path / "shared" / "checkpoints", tmp_path / "other"
    folder.parent.mkdir()
    other.mkdir()
    ended = joined(folder, other, folder.parent)
    refused(ended, f"there is no folder {folder} on host {ELSEWHERE}")
    assert os.listdir(folder) == os.listdir(other) == []


@pytest.mark.parametrize("sees", ["another folder", "none", "the same"])
def test_a_worker_that_does_not_see_the_folder_is_named_when_its_codec_remembers(
    tmp_path: Path, sees: str
) -> None:
    """What worker 1 writes would be missing when the job goes on."""
    folder, other = tmp_path / "shared" / "checkpoints", tmp_path / "other"
    folder.mkdir(parents=True)
    other.mkdir()
    seen = {"another folder": (other, folder), "none": (other, folder.parent)}
    declares = [sys.executable, str(SCRIPTS / "declares.py")]
    far = apart(*seen[sees], declares) if sees in seen else declares
    settings = {"P3KV_CHECKPOINT_DIR": folder, **SUMS_ONLY}
    with held_port() as holder:
        port, since = holder.getsockname()[1], time.monotonic()
        there = {"DMLC_NODE_HOST": ELSEWHERE, "DMLC_WORKER_ID": 1}
        started = {
            "scheduler": start_role("scheduler", JOIN, port, workers=2),
            "server 0": start_role("server", JOIN, port, workers=2, **settings),
            "worker 0": start_role(
                "worker", declares, port, workers=2, DMLC_WORKER_ID=0, **settings
            ),
            "worker 1": start_role("worker", far, port, workers=2, **there, **settings),
        }
        ended = results(started, since, DEADLINE_S)
    if sees == "the same":
        for name in ("worker 0", "worker 1"):
            assert f"{name} has declared its key" in ended[name].output, ended[name].output
    else:
        why = "its files are not there" if sees == "another folder" else "No such file or directory"
        reason = f"worker 1 on host {ELSEWHERE} can't use worker 0's folder {folder}: {why}. Each"
        for name in ("worker 0", "worker 1"):
            assert ended[name].code != 0
            assert reason in ended[name].output, ended[name].output
    assert os.listdir(folder) == os.listdir(other) == []


def test_the_job_says_where_checkpoints_go_and_that_the_folder_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "misspelt" / "run1"
    for made in (True, False):
        result = run_job(
            "join.py", workers=2, servers=2, P3KV_CHECKPOINT_DIR="misspelt/run1", **SUMS_ONLY
        )
        assert result.code == 0, result.output
        where = f"checkpoints go to {folder}"
        assert result.output.count(where) == 1 and where in result.said_by("worker 0")
        assert ("which was made on host 127.0.0.1" in result.output) == made, result.output
        assert os.listdir(folder) == []


def test_what_a_killed_job_has_left_is_removed(tmp_path: Path) -> None:
    marks.leave(str(tmp_path), bytes(16))
    assert len(os.listdir(tmp_path)) == 1
    assert run_job("join.py", P3KV_CHECKPOINT_DIR=tmp_path, **SUMS_ONLY).code == 0
    assert os.listdir(tmp_path) == []


def test_a_mark_that_is_a_link_or_another_user_s_does_not_count(tmp_path: Path) -> None:
    folder, (right, linked, foreign) = str(tmp_path), (bytes([n] * 16) for n in range(3))
    for mark in (right, foreign):
        marks.leave(folder, mark)
    (tmp_path / marks.name(linked)).symlink_to(marks.name(foreign))
    expected = {1: "it is no file, but a link, which is not followed"}
    if os.geteuid() == 0:
        os.chown(tmp_path / marks.name(foreign), 12345, 12345)
        expected[2] = "it belongs to user 12345 and not to 0, this job's"
    assert marks.take(folder, {0: right, 1: linked, 2: foreign}) == expected


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run_job("join.py", P3KV_CHECKPOINT_DIR=folder, **SUMS_ONLY)
        assert result.code != 0
        assert f"the folder {folder} for checkpoints can't be made" in result.output


def test_a_folder_that_another_job_writes_to_is_refused_and_nothing_of_that_is_removed(
    tmp_path: Path,
) -> None:
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path, **SUMS_ONLY}
    held = marks.hold(str(tmp_path))
    assert held is not None
    try:
        marks.leave(str(tmp_path), bytes(16))
        result = run_job("join.py", workers=2, **settings)
        assert result.code != 0
        assert f"another job that runs now writes its checkpoints to {tmp_path}" in result.output
        assert len(os.listdir(tmp_path)) == 1
    finally:
        os.close(held)
    result = run_job("join.py", workers=2, **settings)
    assert result.code == 0 and not os.listdir(tmp_path), result.output
