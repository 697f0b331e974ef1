"""Links over stream sockets of any address family."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Callable, List, Sequence, Tuple

from p3kv.transport.transport import Address, Link, Listener

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
