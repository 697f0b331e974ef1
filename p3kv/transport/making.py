"""Makes the transport that the settings choose."""

from __future__ import annotations

from p3kv.config import Settings
from p3kv.transport.transport import TRANSPORTS, Transport


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
