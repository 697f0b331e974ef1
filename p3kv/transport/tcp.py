"""TCP, tuned so that small frames leave at once and a vanished host is noticed."""

from __future__ import annotations

import socket

from p3kv.transport.sockets import SocketLink, SocketListener
from p3kv.transport.transport import TRANSPORTS, Address, Link, Listener, Transport

_DEAD_IDLE_S = 8
"""An idle link to a host that has vanished ends after about this time (keep-alive)."""
_DEAD_SENDING_S = 60
"""The same while bytes are unacknowledged. Longer, because a peer that is only busy reads none: for
example, a server that imports a framework from a slow disk. The scheduler notices a lost host
sooner."""
_BACKLOG = 512


class Tcp(Transport):
    """Links over TCP; a listener takes a free port."""

    def listen(self, host: str) -> Listener:
        listener = socket.create_server((host, 0), backlog=_BACKLOG)
        return SocketListener(listener, listener.getsockname()[:2], _link)

    def connect(self, address: Address, timeout_s: float) -> Link:
        try:
            return _link(socket.create_connection(address, timeout=timeout_s))
        except ValueError as error:  # a name or port that no address can have
            raise OSError(str(error)) from error


def _link(sock: socket.socket) -> Link:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_SENDING_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_IDLE_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _DEAD_IDLE_S // 2)
    return SocketLink(sock)


TRANSPORTS.register("tcp", Tcp)
