"""Links over stream sockets of any address family."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Callable, List, Sequence, Tuple

from p3kv.common.addresses import family_of
from p3kv.transport.transport import TRANSPORTS, Address, Link, Listener, Transport

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOST_BEFORE = (
    errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET, errno.EOPNOTSUPP,
)  # fmt: skip
"""Errors that Linux gives for a connection that has ended before it was accepted, or that a
firewall did not let in; see accept(2)."""


class SocketLink(Link):
    """A link over a connected stream socket, which it owns from now on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.descriptor = sock.fileno()
        with suppress(OSError):  # it may be closed already
            peer = sock.getpeername()
            if isinstance(peer, tuple):
                self.place = f"from {peer[0]}"

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(buffers)[0]

    def send(self, buffers: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(buffers)

    def wake_at(self, size_bytes: int) -> None:
        try:  # noqa: SIM105  it is quicker, and this is called for every slice
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
        except OSError:  # the link may be closed already
            pass

    def hold_at_most(self, size_bytes: int) -> None:
        with suppress(OSError):  # the link may be closed already
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)

    def close(self) -> None:
        self._socket.close()


class SocketListener(Listener):
    """Accepts links on a listening stream socket, which it owns from now on."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        link: Callable[[socket.socket], Link] = SocketLink,
    ) -> None:
        """`link` makes a link of an accepted socket."""
        sock.setblocking(False)
        self._socket = sock
        self._link = link
        self.address = address
        self.descriptor = sock.fileno()

    def accept(self, most: int) -> Tuple[List[Link], bool]:
        accepted: List[Link] = []
        while len(accepted) < most:
            try:
                accepted.append(self._link(self._socket.accept()[0]))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno in _NO_ROOM:
                    return accepted, True
                if error.errno not in _LOST_BEFORE:
                    raise
        return accepted, False

    def close(self) -> None:
        self._socket.close()


_LONGER_S = 60
"""By how much a link outlives the longest silence that a job allows. The scheduler notices a lost
host sooner; but a link may be cut alone."""
_PROBE_EVERY_S = 2
"""On an idle link. The answer to a probe tells of a link that the other end has lost, and probes
keep those alive that a firewall or an address translator would forget."""
_BACKLOG = 512


class Tcp(Transport):
    """Links over TCP; a listener takes a free port."""

    def listen(self, host: str) -> Listener:
        family = family_of(host)
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        return SocketListener(listener, listener.getsockname()[:2], self._link)

    def connect(self, address: Address, timeout_s: float) -> Link:
        try:
            return self._link(socket.create_connection(address, timeout=timeout_s))
        except ValueError as error:  # a name or port that no address can have
            raise OSError(str(error)) from error

    def _link(self, sock: socket.socket) -> Link:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # For bytes that are not acknowledged or not read, and, with probes, for an idle link.
        dead_ms = int((self.silence_timeout_s + _LONGER_S) * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_ms)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        return SocketLink(sock)


TRANSPORTS.register("tcp", Tcp)
