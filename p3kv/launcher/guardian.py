"""A process that ends the job when the launcher cannot do it any more.

The launcher may be killed in a way that it cannot catch. The guardian then sees the end of its
standard input and ends every process group that the launcher has started. A parent-death signal
would reach only the direct children, and a worker's command is often a shell script that started
the training.

This file also runs as a script of its own (isolated, without site-packages), so it imports
nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Iterable

_POLL_S = 0.05


def group_is_alive(group: int) -> bool:
    """Says whether a process of process group `group` still runs.

    Zombies do not count: where process 1 reaps nobody, as in many containers, an orphan's zombie
    stays for good, and `os.killpg(group, 0)` would find it.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Somebody else's process, but it is there.
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # A process may end while we look.
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                # The command's name stands in parentheses and may hold anything, even these.
                state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
                if int(its_group) == group and state not in (b"Z", b"X"):
                    return True
    return False


def signal_group(group: int, signum: int) -> None:
    """Sends a signal to process group `group`, which may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


class Guardian:
    """The launcher's end: a pipe to the guardian process, which is started here.

    One thread uses it. `announce` runs in a child between fork and exec, so that no moment
    remains in which a started process is unknown to the guardian.
    """

    def __init__(self, grace_s: float) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._grace_s = grace_s
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts the guardian process in a session of its own, out of Ctrl-C's reach."""
        # -I: the user's PYTHONPATH and current folder cannot shadow the standard library.
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(self._grace_s)]
        self._process = subprocess.Popen(
            command, stdin=self._read_fd, stdout=subprocess.DEVNULL, start_new_session=True
        )
        os.close(self._read_fd)
        self._read_fd = -1

    def announce(self) -> None:
        """Says that the calling process leads a group to be ended."""
        os.write(self._write_fd, b"+%d\n" % os.getpid())

    def forget(self, group: int) -> None:
        """Says that a group is gone, so that a later owner of its number is safe."""
        # A guardian that died takes nothing with it but the protection.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_fd, b"-%d\n" % group)

    def close(self) -> None:
        """Ends the guardian process; it ends the groups that were not forgotten."""
        for fd in (self._read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self._write_fd = -1
        if self._process is not None:
            self._process.wait()
            self._process = None


def _end(groups: Iterable[int], grace_s: float) -> None:
    left = [group for group in groups if group_is_alive(group)]
    for group in left:
        signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    # They are not our children, so the kernel tells us nothing of their end: look.
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [group for group in left if group_is_alive(group)]
    for group in left:
        signal_group(group, signal.SIGKILL)


def _guard(grace_s: float) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    if groups:
        with contextlib.suppress(OSError):
            print("p3kv launch: the launcher was killed; ending its processes", file=sys.stderr)
        _end(groups, grace_s)


if __name__ == "__main__":
    _guard(float(sys.argv[1]))
