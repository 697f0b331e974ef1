"""However a job ends, nothing of it is left: no process, no port, no file."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import List, Set, Tuple

import psutil
import pytest

from tests.jobs import DEADLINE_S, SUMS_ONLY, TrainingJob, connections_of, eventually, held_port


class Room:
    """Folders of its own for all that a job may write to, and a look at what it leaves."""

    def __init__(self, path: Path) -> None:
        self.markers = path / "markers"
        self._written = [path / name for name in ("cwd", "home", "tmp")]
        for folder in (self.markers, *self._written):
            folder.mkdir(parents=True)
        self._sockets: Set[Tuple[int, int]] = set()

    def job(self, root_port: int = 0, **settings: object) -> TrainingJob:
        cwd, home, tmp = self._written
        return TrainingJob(
            self.markers, workers=2, servers=2, root_port=root_port, cwd=cwd, HOME=home,
            TMPDIR=tmp, **settings,
        )  # fmt: skip

    def note_ports(self, job: TrainingJob) -> None:
        """Remembers where the scheduler and the servers listen."""
        parts = job.parts()
        assert len(parts) == 5
        ports = [
            port
            for part in parts.values()
            for port, _ in connections_of(part.pid, psutil.CONN_LISTEN)
        ]
        self._sockets = {(port, inode) for port, inode in listening() if port in ports}
        assert len(self._sockets) == len(ports) == 3

    def assert_empty(self) -> None:
        assert processes_with(str(self.markers)) == []
        assert not self._sockets & listening()
        assert [file for folder in self._written for file in folder.rglob("*")] == []


def listening() -> Set[Tuple[int, int]]:
    """Port and inode of all TCP sockets that listen. Another test's job may get a port that has
    become free, but not the inode of a socket that is still there."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    sockets = [line.split() for line in lines]
    return {(int(one[1].split(":")[1], 16), int(one[9])) for one in sockets if one[3] == "0A"}


def processes_with(mark: str) -> List[psutil.Process]:
    """Running processes that have inherited a job's mark, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get("TEST_JOB_MARK") == mark
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_two_runs_one_after_the_other_on_the_same_port_leave_nothing(tmp_path: Path) -> None:
    with held_port() as holder:
        for name, settings in (("first", {}), ("second", SUMS_ONLY)):
            room = Room(tmp_path / name)
            with room.job(root_port=holder.getsockname()[1], **settings) as job:
                job.wait_until_training()
                room.note_ports(job)
                assert len(processes_with(job.mark)) >= 6
                job.stop()
                result = job.result(DEADLINE_S)
            assert result.code == 0, result.output
            room.assert_empty()


def test_scripts_save_what_the_servers_have_when_the_launcher_gets_sigterm(tmp_path: Path) -> None:
    room = Room(tmp_path)
    with room.job(arguments=["saves"], P3KV_STOP_TIMEOUT_S=DEADLINE_S) as job:
        job.wait_until_training()
        job.launcher.send_signal(signal.SIGTERM)
        result = job.result(DEADLINE_S)
    assert result.code == 128 + signal.SIGTERM, result.output
    for rank in range(2):
        assert f"worker {rank}: all weights are right after" in result.output, result.output
    assert "failed" not in result.output
    assert result.output.splitlines()[-1] == "p3kv launch: stopped by SIGTERM"
    room.assert_empty()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_in_mid_training_leaves_nothing(
    tmp_path: Path, signum: signal.Signals
) -> None:
    room = Room(tmp_path)
    with room.job(**(SUMS_ONLY if signum == signal.SIGTERM else {})) as job:
        job.wait_until_training()
        room.note_ports(job)
        job.launcher.send_signal(signum)
        start = time.monotonic()
        result = job.result(DEADLINE_S)
        # A launcher that was killed can't wait for its processes; another process ends them.
        eventually(lambda: not processes_with(job.mark), timeout_s=DEADLINE_S)
        print(f"nothing is left {time.monotonic() - start:.1f} s after {signum.name}")
        assert time.monotonic() - start < DEADLINE_S
    assert result.code == (-signum if signum == signal.SIGKILL else 128 + signum)
    if signum != signal.SIGKILL:
        assert f"p3kv launch: stopped by {signum.name}" in result.output
        assert "Traceback" not in result.output
    room.assert_empty()
