"""TCP to a server whose workers come by way of a test's proxy (`tests.faults.Proxy`)."""

import os
import socket

from p3kv.transport import TRANSPORTS, Address, Listener
from p3kv.transport.sockets import Tcp


class ByProxy(Tcp):
    """Says of itself the address that the proxy at TEST_PROXY, `host:port`, gives it."""

    def listen(self, host: str) -> Listener:
        listener = super().listen(host)
        listener.address = self._address_at_proxy(listener.address)
        return listener

    def _address_at_proxy(self, address: Address) -> Address:
        proxy, _, port = os.environ["TEST_PROXY"].partition(":")
        with socket.create_connection((proxy, int(port)), timeout=10.0) as line:
            line.sendall(f"{address[0]} {address[1]}\n".encode())
            return proxy, int(line.makefile().readline())


TRANSPORTS.register("by_proxy", ByProxy)
