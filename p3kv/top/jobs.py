"""Finds a job of this user by a process of it on this host.

A process's environment says where the job's scheduler is, and the job's secret. The system shows it
only to the user of the process, and to root.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Dict, Optional, Tuple

from p3kv.addresses import endpoint
from p3kv.config import Launch
from p3kv.errors import ConfigError

_PROCESSES = Path("/proc")


def find(pid: Optional[int]) -> Launch:
    """The job of a process, or the only one that has processes here.

    Raises ConfigError where there is none, or more than one.
    """
    if pid is not None:
        found = _job_of(pid)
        if found is None:
            raise ConfigError(f"process {pid} belongs to no job of yours")
        return found
    jobs: Dict[Tuple[str, int, str], Tuple[int, Launch]] = {}
    for entry in os.listdir(_PROCESSES):
        launch = _job_of(int(entry)) if entry.isdigit() else None
        if launch is not None:
            place = (launch.root_host, launch.root_port, launch.job)
            jobs.setdefault(place, (int(entry), launch))
    if len(jobs) > 1:
        some = ", ".join(
            f"{pid} ({endpoint(host, port)})" for (host, port, _), (pid, _) in jobs.items()
        )
        raise ConfigError(f"there are several jobs; name one by a process of it: {some}")
    for _, launch in jobs.values():
        return launch
    raise ConfigError(
        "no process of a job runs on this host as this user. Start 'p3kv top' where a worker, a "
        "server or the scheduler runs, as the same user"
    )


def _job_of(pid: int) -> Optional[Launch]:
    variables = {}
    # It may end while we look, and belong to somebody else.
    with suppress(OSError):
        for line in (_PROCESSES / str(pid) / "environ").read_bytes().split(b"\0"):
            name, _, value = os.fsdecode(line).partition("=")
            variables[name] = value
    with suppress(ConfigError):
        return Launch.from_environment(variables)
    return None
