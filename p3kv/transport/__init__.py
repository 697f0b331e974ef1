"""How bytes get from one process to another: TCP, or a transport that a setting names."""

from p3kv.config import Settings
from p3kv.transport.sockets import SocketLink, SocketListener, Tcp
from p3kv.transport.transport import (
    MAX_ADDRESS,
    TRANSPORTS,
    Address,
    Link,
    Listener,
    Transport,
)

__all__ = [
    "MAX_ADDRESS", "TRANSPORTS", "Address", "Link", "Listener", "SocketLink", "SocketListener",
    "Tcp", "Transport", "make_transport",
]  # fmt: skip


def make_transport(chosen: str, settings: Settings, key: bytes) -> Transport:
    """The transport that is chosen, encrypted if the settings say so, with the job's key for it.

    Raises ConfigError for one that nobody has registered here, and where this Python can't
    encrypt.
    """
    transport = TRANSPORTS.make(chosen, settings.silence_timeout_s)
    if not settings.encrypt:
        return transport
    from p3kv.transport.tls import Tls  # only then, since OpenSSL is large

    return Tls(transport, key)
