"""A process that ends the job when the launcher cannot do it any more.

The launcher may be killed in a way that it cannot catch. The guardian then sees the end of its
standard input and ends every process group that the launcher has started. A parent-death signal
would reach only the direct children, and a worker's command is often a shell script that started
the training.

On another host, where ssh starts it, a guardian watches over one process, which it starts itself
(`_host`).

This file also runs as a script of its own (isolated, without site-packages), so it imports
nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Iterable, Iterator

_POLL_S = 0.05
_LAST_WORDS_S = 1.0
GREETING = b"p3kv guardian\n"
"""First bytes of a guardian on another host; what comes before is the remote shell's."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def group_is_alive(group: int) -> bool:
    """Whether a process of a group still runs, zombies left out: where process 1 reaps nobody, as
    in containers, an orphan's zombie stays, and `os.killpg(group, 0)` would find it."""
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


def signal_scripts(group: int, signum: int) -> None:
    """Send a signal to the processes of a group that have a handler and are not below another one
    that has; to all where none has.

    A shell around a script, or a data loader's helper, would die and the script with it. Ctrl-C
    goes to all, as a terminal's does.
    """
    catching = {} if signum == signal.SIGINT else dict(_members(group, signum))
    above = {pid: parent for pid, (parent, _) in catching.items()}

    def is_below_another(pid: int) -> bool:
        while pid in above:
            pid = above[pid]
            if pid in catching and catching[pid][1]:
                return True
        return False

    chosen = [pid for pid, (_, has) in catching.items() if has and not is_below_another(pid)]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
    if not chosen:
        signal_group(group, signum)


def _members(group: int, signum: int) -> Iterator[tuple[int, tuple[int, bool]]]:
    """The processes of a group, each with its parent and whether it has a handler for a signal."""
    for entry in os.listdir("/proc"):
        # A process may end while we look.
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.getpgid(int(entry)) == group:
                with open(f"/proc/{entry}/status") as status:
                    told = dict(line.split(":", 1) for line in status)
                handlers = int(told["SigCgt"], 16)
                yield int(entry), (int(told["PPid"]), bool(handlers >> (signum - 1) & 1))


def guardian_command(task: str, grace_s: float) -> list[str]:
    """Command of this file: `task` is "guard" (groups of this host) or "host" (a process there)."""
    # -I: the user's PYTHONPATH and current folder cannot shadow the standard library.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), task, str(grace_s)]


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
        self._process = subprocess.Popen(
            guardian_command("guard", self._grace_s),
            stdin=self._read_fd,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
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


def _host(grace_s: float) -> None:
    """Runs one process here for a launcher on another host, and ends with its exit code.

    The first line of the standard input is the errand, a JSON object: `argv`, `env` (set over this
    host's own), `cwd`, `workers_here` (who share the cores) and `has_link`. Each further line is
    the number of a signal for the process's group, with a word behind it if it is for scripts
    alone, or a message for its link. At the end of the input, when the launcher or the way to it
    is gone, the group is ended.

    With `has_link`, the standard output carries what the process says to the launcher, and all that
    it prints goes to the standard error.
    """
    lines = sys.stdin.buffer
    sys.stdout.buffer.write(GREETING)
    sys.stdout.buffer.flush()
    first = lines.readline()
    if not first.startswith(b"{"):
        return  # the launcher has ended, or ends the job before this process was to start
    errand = json.loads(first)
    link, fd = None, -1
    if errand["has_link"]:
        link, theirs = socket.socketpair()
        fd = theirs.detach()
    process = _started(errand, fd)
    group = process.pid
    threading.Thread(target=_report_end, args=(process, link, grace_s), daemon=True).start()
    for line in lines:
        number, *for_scripts = line.split(None, 1)
        if number.isdigit():
            (signal_scripts if for_scripts else signal_group)(group, int(number))
        elif link is not None:
            with contextlib.suppress(OSError):
                link.sendall(line)
    _end([group], grace_s)
    os._exit(1)


def _started(errand: dict[str, Any], link_fd: int) -> subprocess.Popen:
    env = {**os.environ, **errand["env"]}
    cores = len(os.sched_getaffinity(0))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, errand["workers_here"]))))
    if link_fd >= 0:
        env["P3KV_LAUNCHER_FD"] = str(link_fd)
    try:
        process = subprocess.Popen(
            errand["argv"],
            env=env,
            cwd=errand["cwd"],
            pass_fds=[link_fd] if link_fd >= 0 else [],
            stdin=subprocess.DEVNULL,
            stdout=2 if link_fd >= 0 else None,
            start_new_session=True,
        )
    except OSError as error:
        name = error.filename or errand["argv"][0]
        print(
            f"p3kv launch: host {socket.gethostname()} can't start '{errand['argv'][0]}' in "
            f"'{errand['cwd']}': {name}: {error.strerror}. The script and Python must be at the "
            "same paths on all hosts",
            file=sys.stderr,
        )
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
    if link_fd >= 0:
        os.close(link_fd)
    return process


def _report_end(process: subprocess.Popen, link: socket.socket | None, grace_s: float) -> None:
    words = threading.Thread(target=_hand_on, args=(link,), daemon=True)
    words.start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # What it leaves in its group ends with it. Until it is reaped, the number is the group's.
    _end([process.pid], grace_s)
    code = process.wait()
    words.join(_LAST_WORDS_S)
    os._exit(code if code >= 0 else 128 - code)


def _hand_on(link: socket.socket | None) -> None:
    with contextlib.suppress(OSError):
        while link is not None and (data := link.recv(1 << 16)):
            os.write(1, data)


if __name__ == "__main__":
    {"guard": _guard, "host": _host}[sys.argv[1]](float(sys.argv[2]))
