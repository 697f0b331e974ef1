"""Pushes whose results nobody waits for: they are bounded, none is lost, none ends the job."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Dict

import psutil
import pytest

from tests.jobs import SCRIPTS, SUMS_ONLY, end, eventually, held_port, results, run_job, start_role

ROUNDS, ELEMS = 80, 2_500_000
MB = 1_000_000


class ProcessesJob:
    """A scheduler, a server and two workers with a script, each a process known by name."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._since = time.monotonic()
        work = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
        serve = [sys.executable, "-c", "import p3kv"]
        self.processes: Dict[str, subprocess.Popen] = {}
        with held_port() as port:
            number = port.getsockname()[1]
            for name in ("scheduler", "server", "worker 0", "worker 1"):
                role, _, rank = name.partition(" ")
                self.processes[name] = start_role(
                    role, work if rank else serve, number, workers=2, DMLC_WORKER_ID=rank or 0
                )
            eventually(lambda: self._listens(number))

    def _listens(self, port: int) -> bool:
        return any(
            connection.laddr[1] == port
            for connection in psutil.Process(self.processes["scheduler"].pid).net_connections()
        )

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())

    def wait_for(self, *files: Path) -> None:
        """Returns when the files are there; fails, with what was printed, when it ends before."""
        eventually(lambda: not self.alive() or all(file.exists() for file in files), 60)
        if not all(file.exists() for file in files):
            self.end_well()
            raise AssertionError(f"the job ended without {files}")

    def server_bytes(self, name: str) -> int:
        """VmRSS, what the server has in memory, or VmHWM, the most that it ever had."""
        status = Path(f"/proc/{self.processes['server'].pid}/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0]) * 1024

    def end_well(self) -> None:
        """Returns when all have ended in order, and fails, with what they printed, if not."""
        ended = results(self.processes, self._since, 60)
        codes = {name: result.code for name, result in ended.items()}
        said = "\n".join(result.output for result in ended.values())
        assert codes == dict.fromkeys(codes, 0), said

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                end(process)


def test_a_server_keeps_few_rounds_of_a_worker_that_is_ahead(tmp_path: Path) -> None:
    with closing(ProcessesJob("pushes_ahead.py", tmp_path, ROUNDS, ELEMS)) as job:
        job.wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
        before_bytes = job.server_bytes("VmRSS")
        (tmp_path / "go").touch()
        job.wait_for(tmp_path / "right-0", tmp_path / "right-1")
        assert job.server_bytes("VmHWM") - before_bytes < 150 * MB
        (tmp_path / "end").touch()
        job.end_well()


@pytest.mark.parametrize("look", ["", "look"])
def test_a_worker_may_end_right_after_its_last_push(look: str) -> None:
    result = run_job("one_push.py", [look], workers=2, P3KV_SLICE_SIZE=20_000, **SUMS_ONLY)
    assert result.code == 0, result.output
    assert ("the sum is right" in result.output) == bool(look)
