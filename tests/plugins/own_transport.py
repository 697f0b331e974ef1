"""A transport of a user's own: Unix-domain sockets, for a job on one machine."""

import socket

from p3kv.transport import (
    TRANSPORTS,
    Address,
    Link,
    Listener,
    SocketLink,
    SocketListener,
    Transport,
)


class UnixSockets(Transport):
    """Takes an abstract name of Linux's choice: a zero byte and five hexadecimal digits."""

    def listen(self, host: str) -> Listener:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen()
        return SocketListener(listener, (host, int(listener.getsockname()[1:], 16)))

    def connect(self, address: Address, timeout_s: float) -> Link:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        try:
            sock.connect(f"\0{address[1]:05x}")
        except OSError:
            sock.close()
            raise
        return SocketLink(sock)


TRANSPORTS.register("unix", UnixSockets)
