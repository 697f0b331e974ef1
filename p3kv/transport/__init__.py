"""How bytes get from one process to another: TCP, or a transport that a setting names."""

from p3kv.transport.making import make_transport
from p3kv.transport.sockets import SocketLink, SocketListener
from p3kv.transport.tcp import Tcp
from p3kv.transport.transport import (
    MAX_ADDRESS,
    TRANSPORTS,
    Address,
    Link,
    Listener,
    Transport,
)

__all__ = [
    "MAX_ADDRESS",
    "TRANSPORTS",
    "Address",
    "Link",
    "Listener",
    "SocketLink",
    "SocketListener",
    "Tcp",
    "Transport",
    "make_transport",
]
