"""Messages between `p3kv launch` and its scheduler, on a socket that only these two have.

Who starts processes learns of their ends first, and how they ended; the scheduler knows why the job
fails. Each message is a line of JSON.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Generic, List, TypeVar, Union

import msgspec

from p3kv.wire.messages import Message

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 20

M = TypeVar("M")
"""The messages that one end receives."""


class PartEnded(Message, frozen=True):
    """The launcher to the scheduler: a process has ended."""

    role: str
    rank: int
    code: int
    signal: str = ""
    """The signal that killed it, such as SIGKILL."""

    @property
    def how(self) -> str:
        """How it ended, after "its process"."""
        return (
            f"was killed by {self.signal}" if self.signal else f"ended with exit code {self.code}"
        )


class StopPassedOn(Message, frozen=True):
    """The launcher to the scheduler: scripts get a signal to end, each in whatever step it is."""


FromLauncher = Union[PartEnded, StopPassedOn]


class Cause(Message, frozen=True):
    """The scheduler to the launcher: why the job fails."""

    part: str
    """The process that the failure is about, such as "worker 1"."""
    sentence: str
    unreached: List[str]
    """Processes that can't be told: they have not joined, or do not answer."""


class LauncherLink(Generic[M]):
    """One end of the socket. Sending never waits; one thread receives.

    Nobody else can reach the socket: it has no address, and the launcher makes it before it starts
    the scheduler, which inherits the other end.
    """

    def __init__(self, sock: socket.socket, expected: object) -> None:
        """`expected` is what the other end sends: M, a class or a union."""
        self._socket = sock
        self._buffer = b""
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(expected)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Union[FromLauncher, Cause]) -> None:
        """Tells the other end, if it is still there."""
        with suppress(OSError):
            line = msgspec.json.encode(message) + b"\n"
            self._socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self) -> List[M]:
        """Waits for messages and returns them; none once the other end is closed, or has sent
        something else, which is logged."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:  # with words of ours that it has not read
                data = b""
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            if len(self._buffer) > _MOST_LINE_BYTES:
                return self._misunderstood(f"a line of more than {_MOST_LINE_BYTES} bytes")
            if lines or not data:
                try:
                    return [self._decoder.decode(line) for line in lines]
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    return self._misunderstood(str(error))

    def _misunderstood(self, what: str) -> List[M]:
        _log.error(
            "on the socket between 'p3kv launch' and its scheduler came what neither says (%s). "
            "They use it no more; does another program write to P3KV_LAUNCHER_FD?",
            what,
        )
        self._buffer = b""
        return []

    def close(self) -> None:
        """Closes this end; may be called twice."""
        self._socket.close()
