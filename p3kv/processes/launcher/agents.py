"""Helpers on other hosts: a module of p3kv's that runs there and answers questions over ssh."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import Iterator, Sequence

from p3kv.config import told_of
from p3kv.config.variables import forwarded
from p3kv.errors import ConfigError
from p3kv.processes.launcher.guardian import signal_group
from p3kv.processes.launcher.parts import Host, on_host
from p3kv.processes.launcher.process import JobPart, RunningPart, start_part

_TERM_S = 2.0
_SILENCE_S = 60.0
_SILENT_S = 1.0
_MOST_LINE_BYTES = 1 << 20


class Agent:
    """One helper, which one thread asks; questions and answers are lines. The module finds its end
    of the link in P3KV_LAUNCHER_FD, and ends when the link does."""

    def __init__(self, host: Host, module: str) -> None:
        """Start ssh, with a job's environment on `host`; ConfigError if that fails."""
        own = {**os.environ, **told_of(os.environ)}
        part = JobPart("helper", (sys.executable, "-m", module), forwarded(own))
        there = on_host(
            part, host, own_env=own, cwd="/", term_s=_TERM_S, silence_s=_SILENCE_S, has_link=True
        )
        assert there.channel is not None
        self.host = host
        self._socket = there.channel.ours
        self._socket.settimeout(_SILENCE_S)
        try:
            self._running: RunningPart = start_part(there, lambda: None)
        except OSError as error:
            there.channel.close()
            raise ConfigError(
                f"can't start ssh, which reaches other hosts: {error.strerror}. Install the "
                "client of OpenSSH"
            ) from error
        self._heard = b""

    def begin(self) -> None:
        """Waits until the helper has started; OSError, with what ssh says, if it does not."""
        if not self._running.begin():
            raise OSError(self._last_words() or "ssh does not get through")

    def ask(self, question: bytes) -> None:
        """Sends a question; OSError if the helper is gone."""
        self._socket.sendall(question + b"\n")

    def answer(self) -> bytes:
        """The next answer; OSError, with what the helper has said, if none comes."""
        while b"\n" not in self._heard:
            data = self._socket.recv(1 << 16)
            if not data or len(self._heard) > _MOST_LINE_BYTES:
                raise OSError(self._last_words() or "its helper has ended")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def close(self) -> None:
        """Ends the helper and ssh."""
        # At the end of its input, which ssh takes with it, the guardian there ends the helper.
        self._socket.close()
        signal_group(self._running.group, signal.SIGTERM)
        self._running.reap()
        self._running.err.close()

    def _last_words(self) -> str:
        """The last line that ssh or the helper has printed."""
        heard = b""
        # Not up to the end: a connection that ssh keeps for others may hold the pipe open.
        while select.select([self._running.err], [], [], _SILENT_S)[0]:
            data = self._running.err.read(1 << 16)
            if not data:
                break
            heard += data
        lines = [line.strip() for line in heard.decode(errors="replace").splitlines()]
        return next(filter(None, reversed(lines)), "")


@contextlib.contextmanager
def agents_on(hosts: Sequence[Host], module: str) -> Iterator[Sequence[Agent]]:
    """A helper on each host, not begun yet; all are ended at the end."""
    started: list[Agent] = []
    try:
        for host in hosts:
            started.append(Agent(host, module))
        yield started
    finally:
        for agent in started:
            agent.close()
