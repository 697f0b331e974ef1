"""Finds a job of this user by a process of it on this host.

A process's environment says where the job's scheduler is, and the job's secret or a file that has
it. The system shows it only to the user of the process, and to root. But nobody, root least of all,
does what the environment of another account's process says: it may name any file and any port.
"""

from __future__ import annotations

import os
import struct
from contextlib import closing, suppress
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from p3kv.common.addresses import endpoint
from p3kv.config import Launch
from p3kv.errors import ConfigError

_PROCESSES = Path("/proc")
_AT_SECURE = 23
"""See getauxval(3): whether the process runs a program with more rights than whoever started it."""
_AUXILIARY = struct.Struct("@LL")


class Found(NamedTuple):
    """A job, by one of its processes."""

    launch: Launch
    command: str
    """Command that the process runs."""


def find(pid: Optional[int]) -> Found:
    """The job of a process, or the only one that has processes here, by a worker if there is one.

    Raises ConfigError where there is none, or more than one.
    """
    if pid is not None:
        found = _job_of(pid)
        owners = _owners_of(pid) - {os.geteuid()}
        if owners:
            raise ConfigError(
                f"process {pid} belongs to user {min(owners)}, and 'p3kv top' asks only processes "
                f"of its own user, also for root. Run it as this user: sudo -u '#{min(owners)}' ..."
            )
        # A launcher belongs to no job itself.
        below = [] if found is not None else [one for _, one in _jobs_of(_below(pid)).values()]
        if found is None and len(below) != 1:
            several = f", and has started processes of {len(below)} jobs" if below else ""
            raise ConfigError(f"process {pid} belongs to no job of yours{several}")
        return found or below[0]
    jobs = _jobs_of(_numbers())
    if len(jobs) > 1:
        some = ", ".join(
            f"{pid} ({endpoint(host, port)})" for (host, port, _), (pid, _) in jobs.items()
        )
        raise ConfigError(f"there are several jobs; name one by a process of it: {some}")
    for _, found in jobs.values():
        return found
    raise ConfigError(
        "no process of a job runs on this host as this user. Start 'p3kv top' where a worker, a "
        "server or the scheduler runs, as the same user"
    )


def _numbers() -> Iterator[int]:
    """All processes of this host, the oldest numbers first."""
    return iter(sorted(int(entry) for entry in os.listdir(_PROCESSES) if entry.isdigit()))


def _below(pid: int) -> List[int]:
    """The processes that one has started, and those that these have, as a launcher's guardian."""
    started: Dict[int, List[int]] = {}
    for number in _numbers():
        with suppress(OSError), closing(_Process(number)) as process:
            started.setdefault(process.parent(), []).append(number)
    own = started.get(pid, [])
    return [*own, *(one for child in own for one in started.get(child, ()))]


def _jobs_of(numbers: Iterable[int]) -> Dict[Tuple[str, int, str], Tuple[int, Found]]:
    """Jobs of these processes by address and name, each by a process: a worker if there is one."""
    jobs: Dict[Tuple[str, int, str], Tuple[int, Found]] = {}
    for number in numbers:
        found = _job_of(number)
        if found is not None:
            place = (found.launch.root_host, found.launch.root_port, found.launch.job)
            _, known = jobs.setdefault(place, (number, found))
            if known.launch.role != "worker" and found.launch.role == "worker":
                jobs[place] = (number, found)
    return jobs


def _job_of(pid: int) -> Optional[Found]:
    variables = {}
    # It may end while we look, and belong to somebody else.
    with suppress(OSError), closing(_Process(pid)) as process:
        # Twice: it may become another program meanwhile.
        if not process.is_ours():
            return None
        environment, command = process.read("environ"), process.read("cmdline")
        if not process.is_ours():
            return None
        for line in environment.split(b"\0"):
            name, _, value = os.fsdecode(line).partition("=")
            variables[name] = value
        with suppress(ConfigError):
            launch = Launch.from_environment(variables)
            if launch is not None:
                text = os.fsdecode(command.replace(b"\0", b" ")).strip()
                return Found(launch, "".join(one if one.isprintable() else "?" for one in text))
    return None


def _owners_of(pid: int) -> Set[int]:
    with suppress(OSError), closing(_Process(pid)) as process:
        return process.owners()
    return set()


class _Process:
    """A process, and no other that gets its number later; OSError if it has ended."""

    def __init__(self, pid: int) -> None:
        self._folder = os.open(_PROCESSES / str(pid), os.O_RDONLY | os.O_DIRECTORY)

    def read(self, name: str) -> bytes:
        """Reads a file of the process's in /proc."""
        with open(os.open(name, os.O_RDONLY, dir_fd=self._folder), "rb") as file:
            return file.read()

    def owners(self) -> Set[int]:
        """The user whose rights it has, and the one who has started it."""
        lines = self.read("status").splitlines()
        return {int(uid) for line in lines if line.startswith(b"Uid:") for uid in line.split()[1:]}

    def parent(self) -> int:
        """The process that has started it."""
        lines = self.read("status").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(b"PPid:"))

    def is_ours(self) -> bool:
        """Whether it and its environment are of this process's user."""
        if self.owners() != {os.geteuid()}:
            return False
        auxiliary = self.read("auxv")
        whole = len(auxiliary) - len(auxiliary) % _AUXILIARY.size
        return dict(_AUXILIARY.iter_unpack(auxiliary[:whole])).get(_AT_SECURE) == 0

    def close(self) -> None:
        """Forgets the process."""
        os.close(self._folder)
