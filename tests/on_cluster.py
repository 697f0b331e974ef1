"""Jobs that a launcher on a cluster's first host starts on all of its hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import List, Optional, Sequence

import psutil
import pytest

from experiments.cluster import Cluster
from tests.jobs import SCRIPTS, SUMS_ONLY, JobResult, environment, eventually

DEADLINE_S = 60.0
HOLD = [sys.executable, str(SCRIPTS / "hold.py")]
"""A script that joins and stays; its first argument is the job's folder."""
MARK = "DMLC_TEST_MARK"
"""A variable that all processes of the job inherit, or get from the launcher."""


def needs(*problems: Optional[str]) -> pytest.MarkDecorator:
    """Skips a test for the first of the reasons that is one."""
    problem = next(filter(None, problems), None)
    return pytest.mark.skipif(problem is not None, reason=str(problem))


def command_lines() -> List[str]:
    """Those of all processes of this machine: what everybody can read."""
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return lines


class ClusterJob:
    """A launcher's `command` that starts `hold.py` on the hosts, with a folder of its own."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        command: Sequence[str],
        workers: int = 2,
        cwd: Optional[Path] = None,
        **changes: object,
    ) -> None:
        self._folder = folder
        self._workers = [folder / f"worker-{rank}" for rank in range(workers)]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by result
        self.launcher = cluster.hosts[0].popen(
            command,
            env=environment(**{MARK: folder, **SUMS_ONLY, **changes}),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def said(self) -> str:
        """What all have printed so far."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def wait_until_joined(self) -> List[Path]:
        """Returns when all workers have joined, with what each has written of itself."""

        def joined() -> bool:
            assert self.launcher.poll() is None, self.said()
            return all(file.exists() for file in self._workers)

        eventually(joined, DEADLINE_S)
        return self._workers

    def stop(self) -> None:
        """Has the workers end well."""
        (self._folder / "stop").touch()

    def result(self) -> JobResult:
        """How the launcher has ended, once nothing of the job is left."""
        try:
            self.launcher.wait(DEADLINE_S)
        finally:
            said = self.said()
            self._output.close()
        eventually(lambda: not self.left())
        return JobResult(self.launcher.returncode, said, 0.0)

    def left(self) -> List[psutil.Process]:
        """The job's processes that run, on all hosts."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                marked = process.environ().get(MARK) == str(self._folder)
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
