"""One part of a job: its command, its process and group, here or on another host, and their end.

A process on another host is ssh's, and a guardian there starts the part's own. Nothing secret may
be in a command line, so the guardian hears on ssh's standard input what to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, Callable, Iterator, Mapping, Sequence

from p3kv.processes.launcher.guardian import GREETING, signal_group, signal_scripts

_MOST_GREETING_BYTES = 1 << 16


class GuardianChannel:
    """The launcher's end of the channel to one process on `host`; one thread uses it.

    `ours` is this end's socket and `theirs` ssh's; with `has_link`, both ways are in use. The
    environment has the secret: it is never shown.
    """

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        workers_here: int,
        has_link: bool,
    ) -> None:
        self.host = host
        self.has_link = has_link
        self.ours, self.theirs = socket.socketpair()
        errand = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd,
            "workers_here": workers_here,
            "has_link": has_link,
        }
        self._errand = json.dumps(errand).encode() + b"\n"

    def wait_for_greeting(self, output: IO[bytes] | None, timeout_s: float) -> bool:
        """Wait for the guardian's greeting; False if it does not come. `output` is ssh's standard
        output if that is not the channel; what a remote shell prints before is dropped."""
        stream = self.ours if output is None else output
        deadline = time.monotonic() + timeout_s
        heard = b""
        while not heard.endswith(GREETING):
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([stream], [], [], wait_s)[0] or len(heard) > _MOST_GREETING_BYTES:
                return False
            # One byte at a time: what follows the greeting is for others.
            byte = self.ours.recv(1) if output is None else output.read(1)
            if not byte:
                return False
            heard += byte
        return True

    def tell_errand(self) -> None:
        """Start the process."""
        self._send(self._errand)
        self._errand = b""

    def signal(self, signum: int) -> None:
        """Send a signal to the process's group."""
        self._send(b"%d\n" % signum)

    def signal_scripts(self, signum: int) -> None:
        """Send a signal to the group's scripts."""
        self._send(b"%d scripts\n" % signum)

    def _send(self, line: bytes) -> None:
        # ssh may have ended: whoever waits for it learns that.
        with contextlib.suppress(OSError):
            self.ours.sendall(line)

    def close(self) -> None:
        """Closes both ends; may be called twice."""
        self.ours.close()
        self.theirs.close()


@dataclass(frozen=True)
class JobPart:
    """One process of a job, not yet started.

    `name` is what people read ("worker 0"). A part with `serves_workers` has nothing to do once
    the others have ended and is expected to end by itself then. `pass_fds` are open descriptors
    that the process inherits under the same numbers. With a `channel` the process is ssh, and the
    part's own process runs on another host.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # the secret is in it
    serves_workers: bool = False
    pass_fds: tuple[int, ...] = ()
    channel: GuardianChannel | None = None


CONNECT_TIMEOUT_S = 30
"""How long ssh tries to connect."""
_GREETING_TIMEOUT_S = 2.0 * CONNECT_TIMEOUT_S
_SSH_FAILED = 255
_SIGNALLED = 128


def signal_name(signum: int) -> str:
    """Returns "SIGTERM" for 15."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # The real-time signals have no names.


class RunningPart:
    """A started part: a process that leads a session and a process group of its own.

    Once it has ended, `code` is its exit code as a shell would give it, `how` says how it ended,
    and `signal` names the signal that did it, if one did. `is_over` says that nothing of its group
    is left to wait for. `due_s` is when the next measure against it is due, on the monotonic clock.
    """

    def __init__(self, part: JobPart, process: subprocess.Popen) -> None:
        self.part = part
        self.group = process.pid
        self.code: int | None = None
        self.how = ""
        self.signal = ""
        self.is_over = False
        self.is_killed = False
        self.due_s: float | None = None
        self._process = process

    @property
    def out(self) -> IO[bytes] | None:
        """Pipe from its standard output; None if that is a link."""
        return self._process.stdout

    @property
    def err(self) -> IO[bytes]:
        """Pipe from its standard error."""
        assert self._process.stderr is not None
        return self._process.stderr

    def begin(self) -> bool:
        """Waits until the part's own process can start, and has it start; false if it can't."""
        return True

    def wait_unreaped(self) -> None:
        """Returns when the process has ended; its number stays taken until `reap`."""
        os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOWAIT)

    def reap(self) -> None:
        """Frees the ended process's number, and sets `code` and `how`."""
        code = self._process.wait()
        self.code = code if code >= 0 else 128 - code
        self.signal = "" if code >= 0 else signal_name(-code)
        self.how = f"killed by {self.signal}" if self.signal else f"exit code {code}"

    @property
    def whereabouts(self) -> str:
        """Where to look for what is left of it."""
        return f"process group {self.group}"

    def send_signal(self, signum: int) -> None:
        """Sends a signal to all of the group."""
        signal_group(self.group, signum)

    def pass_on(self, signum: int) -> None:
        """Sends a signal, which the launcher has got, to the scripts in the group."""
        signal_scripts(self.group, signum)

    def terminate(self, term_s: float) -> None:
        """Asks the group to end, and sets when it is to be killed if it has not."""
        if self.due_s is None:
            self.send_signal(signal.SIGTERM)
            # What is stopped would not notice.
            self.send_signal(signal.SIGCONT)
            self.due_s = time.monotonic() + term_s

    def hurry(self) -> None:
        """Makes the killing due now."""
        if not self.is_killed:
            self.due_s = time.monotonic()

    def take_due_measure(self, now_s: float, kill_s: float) -> None:
        """Kills the group when that is due, and later gives up on what the kernel keeps."""
        if self.due_s is not None and now_s >= self.due_s:
            if self.is_killed:
                self.is_over = True
            else:
                self.send_signal(signal.SIGKILL)
                self.is_killed = True
                self.due_s = now_s + kill_s


class RunningElsewhere(RunningPart):
    """A part whose process runs on another host: the process here is ssh, which ends with it."""

    def __init__(self, part: JobPart, process: subprocess.Popen, channel: GuardianChannel) -> None:
        super().__init__(part, process)
        self._channel = channel

    def begin(self) -> bool:
        if not self._channel.wait_for_greeting(self.out, _GREETING_TIMEOUT_S):
            return False
        self._channel.tell_errand()
        return True

    @property
    def whereabouts(self) -> str:
        return f"on {self._channel.host}"

    def reap(self) -> None:
        super().reap()
        assert self.code is not None
        self._channel.close()
        if self.code == _SSH_FAILED:
            self.how = "exit code 255, its own or ssh's,"
        elif self.code > _SIGNALLED and not self.signal:
            # ssh ends with the number that a shell gives to a process that a signal has killed.
            self.signal = signal_name(self.code - _SIGNALLED)
            self.how = f"killed by {self.signal}"
        self.how += f" on {self._channel.host}"

    def send_signal(self, signum: int) -> None:
        self._channel.signal(signum)

    def pass_on(self, signum: int) -> None:
        self._channel.signal_scripts(signum)

    def take_due_measure(self, now_s: float, kill_s: float) -> None:
        super().take_due_measure(now_s, kill_s)
        if self.is_over:
            signal_group(self.group, signal.SIGKILL)  # ssh has no way to the host any more


def start_part(part: JobPart, before_exec: Callable[[], None]) -> RunningPart:
    """Start a part's process, which leads a group; its output comes by pipes, but for a link's.
    `before_exec` runs in it first. OSError."""
    channel = part.channel
    process = subprocess.Popen(
        part.argv,
        env=dict(part.env),
        pass_fds=part.pass_fds,
        stdin=subprocess.DEVNULL if channel is None else channel.theirs.fileno(),
        stdout=channel.theirs.fileno()
        if channel is not None and channel.has_link
        else subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=before_exec,
    )
    if channel is None:
        return RunningPart(part, process)
    channel.theirs.close()
    return RunningElsewhere(part, process, channel)


_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_CONNECTIONS_AT_ONCE = 8
"""To one host. sshd drops some of those that are not authenticated yet, from 10 on."""


class CannotStart(Exception):
    """A part can't be started: what to say, and the exit code that a shell would give."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def check_commands(parts: Sequence[JobPart]) -> None:
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


def started(parts: Sequence[JobPart], before_exec: Callable[[], None]) -> Iterator[RunningPart]:
    """Start the parts; yield each when it runs, though ssh may still connect. `before_exec` runs in
    each. CannotStart when the system or ssh refuses one."""
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


def _waves(parts: Sequence[JobPart]) -> list[list[JobPart]]:
    waves: list[list[JobPart]] = [[]]
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
