"""Handshakes: connections that have not shown yet that they belong to the job."""

from __future__ import annotations

import logging
from typing import Dict, NamedTuple, Optional

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection, Landing, new_memory
from p3kv.wire.fields import HelloHeader
from p3kv.wire.header import MAGIC
from p3kv.wire.messages import PROTOCOL_VERSION, DataHello, decode
from p3kv.wire.proofs import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, Proofs, is_right, nonce
from p3kv.wire.refusals import Refusals

HANDSHAKE_S = 5.0
"""A connection without a complete handshake is closed after this time."""
_MAX_PENDING = 128
"""Connections that may be open without a hello, or without a proof, besides one for each worker, as
all may come at the same time. A worker sends its hello at once."""
_NOT_OURS = (
    "it does not know this job's secret. If it is a worker of this job, give all its processes the "
    "same P3KV_SECRET"
)

_log = logging.getLogger(__name__)


class _Challenge(NamedTuple):
    """Challenge that a worker has to answer."""

    worker: int
    workers_nonce: bytes
    servers_nonce: bytes


class Handshakes:
    """Authenticates connections, and tells which worker each belongs to (`p3kv.wire.proofs`)."""

    def __init__(self, proofs: Proofs, num_workers: int) -> None:
        self._proofs = proofs
        self._num_workers = num_workers
        self._most_pending = _MAX_PENDING + num_workers
        self._strangers: Dict[Connection, None] = {}
        """Connections without a hello, the oldest first."""
        self._challenged: Dict[Connection, _Challenge] = {}
        self._processes: Dict[int, bytes] = {}
        """By rank, what the worker's process has chosen."""
        self._refusals = Refusals(_log)

    def add(self, connection: Connection) -> Optional[Connection]:
        """Takes a new connection; returns the oldest one that has said nothing that a worker says
        if there are too many without a hello."""
        self._strangers[connection] = None
        if len(self._strangers) <= self._most_pending:
            return None
        return next((c for c in self._strangers if not c.is_known), connection)

    def waits_for_hello(self, connection: Connection) -> bool:
        """Whether a connection has said nothing that a worker says."""
        return connection in self._strangers and not connection.is_known

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._strangers or connection in self._challenged

    def land_hello(self, connection: Connection, header: HelloHeader) -> Landing:
        """Lands a hello; ProtocolError for one of another protocol."""
        if header.magic != MAGIC:
            raise ProtocolError("what it sent is not p3kv's protocol")
        if header.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"it speaks protocol {header.version}, this server {PROTOCOL_VERSION}; "
                "install the same p3kv everywhere"
            )
        if header.payload_bytes != HELLO_BYTES:
            raise ProtocolError(f"it sent a hello of {header.payload_bytes} bytes")
        return new_memory(header)

    def challenge(self, connection: Connection, header: HelloHeader, payload: memoryview) -> bytes:
        """Takes a hello that has arrived; returns what the worker must answer.

        ProtocolError if whoever sent it does not know the job's secret.
        """
        hello = bytes(payload)
        workers_nonce, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not is_right(proof, self._proofs.hello(header.rank, workers_nonce)):
            raise ProtocolError(_NOT_OURS)
        if len(self._challenged) >= self._most_pending:
            raise ProtocolError("too many others have said hello and shown no proof")
        del self._strangers[connection]
        challenge = _Challenge(header.rank, workers_nonce, nonce())
        self._challenged[connection] = challenge
        return challenge.servers_nonce + self._proofs.challenge(*challenge)

    def admit(self, connection: Connection, payload: memoryview) -> DataHello:
        """Completes a handshake; ProtocolError if the peer is not a worker of this job, or not the
        process that was connected as this worker before."""
        challenge = self._challenged[connection]
        proof, words = bytes(payload[:PROOF_BYTES]), bytes(payload[PROOF_BYTES:])
        if not is_right(proof, self._proofs.answer(*challenge, words)):
            raise ProtocolError(f"its proof is wrong: {_NOT_OURS}")
        hello: DataHello = decode(words, DataHello)
        right = hello.rank == challenge.worker and 0 <= hello.rank < self._num_workers
        if not right or self._processes.get(hello.rank, hello.process) != hello.process:
            raise ProtocolError(f"it says to be worker {hello.rank}, which can't be")
        self._processes[hello.rank] = hello.process
        del self._challenged[connection]
        connection.conversation.peer = hello.rank
        return hello

    def refuse(self, connection: Connection, reason: str) -> bool:
        """Forgets a connection whose handshake failed; False if its handshake was complete."""
        if connection not in self:
            return False
        self._strangers.pop(connection, None)
        self._challenged.pop(connection, None)
        self._refusals.note(f"{reason} ({connection.place})")
        return True
