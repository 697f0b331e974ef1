"""TCP, tuned so that small frames leave at once and a vanished host is noticed."""

from __future__ import annotations

import socket

from p3kv.common.addresses import family_of
from p3kv.transport.sockets import SocketLink, SocketListener
from p3kv.transport.transport import TRANSPORTS, Address, Link, Listener, Transport

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
