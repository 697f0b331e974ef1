"""Handshakes: connections that have not shown yet that they belong to the job."""

from __future__ import annotations

import hmac
import logging
from typing import Container, Dict, Optional

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection
from p3kv.wire.header import MAGIC, Header
from p3kv.wire.messages import MAX_HELLO_BYTES, PROTOCOL_VERSION, TOKEN_BYTES, DataHello, decode
from p3kv.wire.refusals import Refusals

HANDSHAKE_S = 5.0
"""A connection without a complete hello is closed after this time."""
_MAX_PENDING = 128
"""Connections that may be open without a hello; a worker sends its hello at once."""

_log = logging.getLogger(__name__)


class Handshakes:
    """Authenticates connections by the job's token, and tells which worker each belongs to."""

    def __init__(self, token: bytes, num_workers: int) -> None:
        self._token = token
        self._num_workers = num_workers
        self._hellos: Dict[Connection, bytearray] = {}
        self._refusals = Refusals(_log)

    def add(self, connection: Connection) -> Optional[Connection]:
        """Takes a new connection; returns the oldest one if there are too many."""
        self._hellos[connection] = bytearray(MAX_HELLO_BYTES)
        return next(iter(self._hellos)) if len(self._hellos) > _MAX_PENDING else None

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._hellos

    def land(self, connection: Connection, header: Header) -> memoryview:
        """Where a hello's payload goes; ProtocolError for one of another protocol."""
        if header.key != MAGIC:
            raise ProtocolError("what it sent is not p3kv's protocol")
        if header.slice != PROTOCOL_VERSION:
            raise ProtocolError(
                f"it speaks protocol {header.slice}, this server {PROTOCOL_VERSION}; "
                "install the same p3kv everywhere"
            )
        return memoryview(self._hellos[connection])[: header.payload_bytes]

    def admit(
        self, connection: Connection, payload: memoryview, taken: Container[int]
    ) -> DataHello:
        """Completes a handshake; ProtocolError if the peer is not a worker of this job.

        `taken` are the ranks that are connected already.
        """
        if not hmac.compare_digest(payload[:TOKEN_BYTES], self._token):
            raise ProtocolError("it does not belong to this job")
        hello: DataHello = decode(payload[TOKEN_BYTES:], DataHello)
        if not 0 <= hello.rank < self._num_workers or hello.rank in taken:
            raise ProtocolError(f"it says to be worker {hello.rank}, which can't be")
        del self._hellos[connection]
        connection.conversation.peer = hello.rank
        return hello

    def refuse(self, connection: Connection, reason: str) -> bool:
        """Forgets a connection whose handshake failed; False if its handshake was complete."""
        if self._hellos.pop(connection, None) is None:
            return False
        self._refusals.note(reason)
        return True
