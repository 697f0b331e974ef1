"""The channel to the guardian of a process on another host: the socket of ssh's standard input.

Nothing secret may be in a command line, so the guardian hears on this channel what to start.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import IO, Mapping, Sequence

from p3kv.processes.launcher.guardian import GREETING

_MOST_GREETING_BYTES = 1 << 16


class GuardianChannel:
    """The launcher's end of the channel to one process on `host`; one thread uses it.

    `ours` is this end's socket and `theirs` ssh's. With `has_link`, ssh writes what the process
    says to the launcher to `theirs`, too. The environment has the secret: it is never shown.
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
        """Returns when the guardian on the host has greeted, or false if it does not.

        `output` is ssh's standard output, if that is not the channel. What a remote shell prints at
        its start comes before the greeting and is dropped.
        """
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
        """Has the guardian start the process."""
        self._send(self._errand)
        self._errand = b""

    def signal(self, signum: int) -> None:
        """Has the guardian send a signal to the process's group."""
        self._send(b"%d\n" % signum)

    def signal_scripts(self, signum: int) -> None:
        """Has the guardian send a signal to the group's scripts."""
        self._send(b"%d scripts\n" % signum)

    def _send(self, line: bytes) -> None:
        # ssh may have ended: whoever waits for it learns that.
        with contextlib.suppress(OSError):
            self.ours.sendall(line)

    def close(self) -> None:
        """Closes both ends; may be called twice."""
        self.ours.close()
        self.theirs.close()
