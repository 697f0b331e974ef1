"""What `p3kv launch` and its scheduler tell each other, on a socket that only these two have.

Who starts processes learns of their ends first, and how they ended; the scheduler knows why the job
fails. Each message is a line of JSON.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import List, Union

import msgspec

from p3kv.wire.messages import Message

_READ_BYTES = 1 << 16


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


class Cause(Message, frozen=True):
    """The scheduler to the launcher: why the job fails."""

    part: str
    """The process that the failure is about, such as "worker 1"."""
    sentence: str
    unreached: List[str]
    """Processes that can't be told: they have not joined, or do not answer."""


class LauncherLink:
    """One end of the socket. Sending never waits; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""
        self._decoder = msgspec.json.Decoder(Union[PartEnded, Cause])

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Union[PartEnded, Cause]) -> None:
        """Tells the other end, if it is still there."""
        with suppress(OSError):
            line = msgspec.json.encode(message) + b"\n"
            self._socket.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self) -> List[Union[PartEnded, Cause]]:
        """Waits for messages and returns them; none once the other end is closed."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:  # with words of ours that it has not read
                data = b""
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            if lines or not data:
                return [self._decoder.decode(line) for line in lines]

    def close(self) -> None:
        """Closes this end; may be called twice."""
        self._socket.close()
