"""A transport that connects by a wiretap, TEST_WIRETAP, and tells it the way to go on."""

import os
import socket

from p3kv.transport import TRANSPORTS, Address, Link, SocketLink, Tcp


class ByWiretap(Tcp):
    """TCP, but for the way of connections."""

    def connect(self, address: Address, timeout_s: float) -> Link:
        sock = socket.create_connection(("127.0.0.1", int(os.environ["TEST_WIRETAP"])), timeout_s)
        sock.sendall(f"{address[0]} {address[1]}\n".encode())
        return SocketLink(sock)


TRANSPORTS.register("by_wiretap", ByWiretap)
