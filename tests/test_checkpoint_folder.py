"""The folder of checkpoints: said at the start, and one and the same for all that use it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict

import pytest

from p3kv.checkpoints import marks
from tests.jobs import (
    DEADLINE_S,
    JOIN,
    SUMS_ONLY,
    JobResult,
    held_port,
    results,
    run_job,
    start_role,
)

ELSEWHERE = "127.0.0.2"
"""The address of the server that is on another host."""


def joined(folder: Path, other: Path, at: Path) -> Dict[str, JobResult]:
    """How the processes of a job with two servers end that do nothing but join. Server 1 has the
    address `ELSEWHERE`, and sees the folder `other` at the place of `at`."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mounting = 'mount --bind "$0" "$1" && shift && exec "$@"'
    apart = ["unshare", "--mount", "sh", "-c", mounting, str(other), str(at)]
    with held_port() as holder:
        port, since = holder.getsockname()[1], time.monotonic()
        here = {"P3KV_CHECKPOINT_DIR": folder, **SUMS_ONLY}
        there = {"DMLC_NODE_HOST": ELSEWHERE, "DMLC_SERVER_ID": 1}
        started = {
            "scheduler": start_role("scheduler", JOIN, port, servers=2),
            "server 0": start_role("server", JOIN, port, servers=2, DMLC_SERVER_ID=0, **here),
            "server 1": start_role("server", [*apart, *JOIN], port, servers=2, **there, **here),
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
