"""Starts a job's parts: all commands are looked at first, and no sshd is asked for too much."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import Callable, Iterator, Sequence

from p3kv.processes.launcher.parts import Part
from p3kv.processes.launcher.process import RunningPart, start_part

_NOT_FOUND, _NOT_EXECUTABLE, _SSH_FAILED = 127, 126, 255
_CONNECTIONS_AT_ONCE = 8
"""To one host. sshd drops some of those that are not authenticated yet, from 10 on."""


class CannotStart(Exception):
    """A part can't be started: what to say, and the exit code that a shell would give."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def check_commands(parts: Sequence[Part]) -> None:
    """Raises CannotStart if a part's command is not there, or is not executable."""
    for part in parts:
        path = part.env.get("PATH", os.defpath)
        if shutil.which(part.argv[0], path=path) is None:
            exists = os.path.isfile(part.argv[0])
            problem = "is not executable" if exists else "was not found"
            if part.argv[0].endswith(".py"):
                problem += f"; is it 'python {part.argv[0]}'?"
            raise CannotStart(
                _NOT_EXECUTABLE if exists else _NOT_FOUND,
                f"cannot start {part.name}: the command '{part.argv[0]}' {problem}",
            )


def started(parts: Sequence[Part], before_exec: Callable[[], None]) -> Iterator[RunningPart]:
    """Starts the parts and yields each when it runs; those on other hosts may still connect.

    `before_exec` runs in each new process. Raises CannotStart when the system or ssh
    refuses one.
    """
    for wave in _waves(parts):
        connecting = []
        for part in wave:
            try:
                running = start_part(part, before_exec)
            except OSError as error:
                code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
                raise CannotStart(
                    code, f"cannot start {part.name}: '{part.argv[0]}': {error.strerror}"
                ) from error
            yield running
            connecting.append(running)
        for running in connecting:
            if not running.begin():
                name, where = running.part.name, running.whereabouts
                raise CannotStart(
                    _SSH_FAILED,
                    f"cannot start {name} {where}: see what ssh says above. ssh must reach the "
                    f"host without a password, and the host must have p3kv at the same path",
                )


def _waves(parts: Sequence[Part]) -> list[list[Part]]:
    waves: list[list[Part]] = [[]]
    on_host: Counter[str] = Counter()
    for part in parts:
        wave = 0
        if part.channel is not None:
            wave = on_host[part.channel.host] // _CONNECTIONS_AT_ONCE
            on_host[part.channel.host] += 1
        while len(waves) <= wave:
            waves.append([])
        waves[wave].append(part)
    return waves
