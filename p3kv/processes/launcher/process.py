"""A started part: its process, its process group, and how both end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import IO, Callable

from p3kv.processes.launcher.guardian import signal_group, signal_scripts
from p3kv.processes.launcher.guardian_channel import GuardianChannel
from p3kv.processes.launcher.parts import Part

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

    def __init__(self, part: Part, process: subprocess.Popen) -> None:
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

    def __init__(self, part: Part, process: subprocess.Popen, channel: GuardianChannel) -> None:
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


def start_part(part: Part, before_exec: Callable[[], None]) -> RunningPart:
    """Starts a part's process; its output can be read from pipes, but for what is a link's.

    `before_exec` runs in the new process, which leads a group. Raises OSError.
    """
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
