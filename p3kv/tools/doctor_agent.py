"""Helper on each host for `p3kv doctor -H`: answers questions until the launcher is gone.

Questions and answers are lines of JSON. Ways between hosts are measured with TCP, as jobs use it.
"""

from __future__ import annotations

import hmac
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import Iterator, Optional, Union

import msgspec

from p3kv.common.addresses import family_of
from p3kv.config import Launch
from p3kv.tools.doctor import Seen, examine


class Look(msgspec.Struct, frozen=True, tag=True):
    """Look at your host, and listen for probes; answered by `Looked`."""

    root_host: str
    token: str
    """Token that probes must show; for this check only."""


class Looked(msgspec.Struct, frozen=True):
    seen: Seen
    port: Optional[int]
    """Where probes connect; None without an address."""


class TellTime(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Time`."""


class Time(msgspec.Struct, frozen=True):
    time_s: float
    """Time of the host's clock, since 1970."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Send single bytes to another helper; answered by `WayMeasured`, in seconds: the fastest round
    trip."""

    address: str
    port: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send to another helper for a third of a second; answered by `WayMeasured`, in bytes a second:
    how much has arrived."""

    address: str
    port: int


class WayMeasured(msgspec.Struct, frozen=True):
    """Number that was measured, or why none was."""

    number: float = 0.0
    problem: str = ""


Question = Union[Look, TellTime, Ping, Send]


_MEASURE_S = 0.3
_SETTLE_S = 0.1
"""TCP begins slowly; what arrives then does not count."""
_ROUND_TRIPS = 10
_BLOCK_BYTES = 1 << 18
_PATIENCE_S = 5.0
_PING, _BULK = b"?", b"!"


class Target(threading.Thread):
    """Listens for probes that show the token: answers single bytes, then counts what arrives."""

    def __init__(self, address: str, token: str) -> None:
        """Raises OSError if nobody can listen at the address."""
        super().__init__(name="p3kv-doctor-target", daemon=True)
        self._listener = socket.create_server((address, 0), family=family_of(address))
        self._token = token.encode()
        self.port: int = self._listener.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:  # closed
                return
            with link, suppress(OSError):
                link.settimeout(_PATIENCE_S)
                self._serve(link)

    def close(self) -> None:
        """Ends the thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()

    def _serve(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_exactly(link, len(self._token)), self._token):
            return
        while _exactly(link, 1) == _PING:
            link.sendall(_PING)
        buffer = bytearray(_BLOCK_BYTES)
        counted, since_s = 0, 0.0
        begin_s = now_s = time.monotonic()
        while now_s - begin_s < _SETTLE_S + _MEASURE_S:
            size = link.recv_into(buffer)
            now_s = time.monotonic()
            if not size:
                return
            if since_s:
                counted += size
            elif now_s - begin_s >= _SETTLE_S:
                since_s = now_s
        elapsed_s = now_s - since_s
        link.sendall(msgspec.json.encode(counted / elapsed_s if counted else 0.0) + b"\n")
        while link.recv_into(buffer):  # or what has not been read would reset the answer
            pass


def round_trip_s(address: str, port: int, token: str) -> float:
    """The fastest round trip to the target at an address. Raises OSError."""
    with _connected(address, port, token) as link:
        return min(_round_trip_s(link) for _ in range(_ROUND_TRIPS))


def _round_trip_s(link: socket.socket) -> float:
    begin_s = time.monotonic()
    link.sendall(_PING)
    _exactly(link, 1)
    return time.monotonic() - begin_s


def rate_bytes_s(address: str, port: int, token: str) -> float:
    """How much arrives at the target at an address in a second. Raises OSError."""
    with _connected(address, port, token) as link:
        link.sendall(_BULK)
        return _bytes_s(link)


@contextmanager
def _connected(address: str, port: int, token: str) -> Iterator[socket.socket]:
    with socket.create_connection((address, port), timeout=_PATIENCE_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(token.encode())
        yield link


def _bytes_s(link: socket.socket) -> float:
    """Sends until the target says how much has arrived in a second."""
    block = bytes(_BLOCK_BYTES)
    link.setblocking(False)
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        readable, writable, _ = select.select([link], [link], [], _PATIENCE_S)
        if readable:
            link.settimeout(_PATIENCE_S)
            with link.makefile("rb") as answer:
                line = answer.readline()
            if not line:
                raise ConnectionError("the connection ended while it was measured")
            return msgspec.json.decode(line, type=float)
        if writable:
            link.send(block)
    raise TimeoutError("the connection stopped while it was measured")


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return data


def main() -> None:
    """Answers each line on the link to the launcher."""
    launch = Launch.of_a_worker(None)
    assert launch.launcher_fd is not None, "p3kv doctor starts this"
    decoder: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
    agent = _Agent()
    with socket.socket(fileno=launch.launcher_fd) as link, link.makefile("rb") as questions:
        for line in questions:
            link.sendall(msgspec.json.encode(agent.answer(decoder.decode(line))) + b"\n")
    agent.close()


class _Agent:
    def __init__(self) -> None:
        self._token = ""
        self._target: Optional[Target] = None

    def close(self) -> None:
        if self._target is not None:
            self._target.close()

    def answer(self, question: Question) -> msgspec.Struct:
        if isinstance(question, TellTime):
            return Time(time.time())
        if isinstance(question, Look):
            return self._look(question)
        measure = round_trip_s if isinstance(question, Ping) else rate_bytes_s
        try:
            return WayMeasured(measure(question.address, question.port, self._token))
        except OSError as error:
            return WayMeasured(problem=error.strerror or str(error))

    def _look(self, question: Look) -> Looked:
        seen = examine(question.root_host)
        self._token = question.token
        if seen.address is None:
            return Looked(seen, None)
        self._target = Target(seen.address, self._token)
        return Looked(seen, self._target.port)


if __name__ == "__main__":
    main()
