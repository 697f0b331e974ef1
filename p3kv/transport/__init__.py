"""How bytes get from one process to another: TCP, or a transport that a setting names."""

from p3kv.transport.sockets import SocketLink, SocketListener, Tcp
from p3kv.transport.transport import (
    MAX_ADDRESS,
    TRANSPORTS,
    Address,
    Link,
    Listener,
    Transport,
    make_transport,
)

__all__ = [
    "MAX_ADDRESS", "TRANSPORTS", "Address", "Link", "Listener", "SocketLink", "SocketListener",
    "Tcp", "Transport", "make_transport",
]  # fmt: skip
