"""A started part: its process, its process group, and how both end."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from p3kv.launcher.guardian import signal_group
from p3kv.launcher.parts import Part


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

    def wait_unreaped(self) -> None:
        """Returns when the process has ended; its number stays taken until `reap`."""
        os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOWAIT)

    def reap(self) -> None:
        """Frees the ended process's number, and sets `code` and `how`."""
        code = self._process.wait()
        self.code = code if code >= 0 else 128 - code
        self.signal = "" if code >= 0 else signal_name(-code)
        self.how = f"killed by {self.signal}" if self.signal else f"exit code {code}"

    def terminate(self, term_s: float) -> None:
        """Asks the group to end, and sets when it is to be killed if it has not."""
        if self.due_s is None:
            signal_group(self.group, signal.SIGTERM)
            # What is stopped would not notice.
            signal_group(self.group, signal.SIGCONT)
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
                signal_group(self.group, signal.SIGKILL)
                self.is_killed = True
                self.due_s = now_s + kill_s
