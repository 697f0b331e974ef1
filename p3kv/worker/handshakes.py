"""Shows the servers that this worker belongs to the job, and has them show the same."""

from __future__ import annotations

import secrets
from typing import Dict, NamedTuple

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection, Landing, new_memory
from p3kv.wire.fields import Header, HelloHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import MAGIC, URGENT, Kind
from p3kv.wire.messages import PROTOCOL_VERSION, TOKEN_BYTES, DataHello, JobSettings, encode
from p3kv.wire.proofs import CHALLENGE_BYTES, NONCE_BYTES, Proofs, is_right, nonce


class _Hello(NamedTuple):
    """Hello of this worker to a server."""

    proofs: Proofs
    nonce: bytes
    words: bytes
    """Words that it says with its proof."""


class Handshakes:
    """The worker's side of `p3kv.wire.proofs`, on all its connections.

    `begin` is called before the worker's thread begins to serve the connection; the rest belongs to
    this thread.
    """

    def __init__(self, key: bytes, rank: int, settings: JobSettings) -> None:
        """`key` is the job's (`Credentials.data_key`)."""
        self._key = key
        self._rank = rank
        self._settings = settings
        self._process = secrets.token_bytes(TOKEN_BYTES)
        self._hellos: Dict[Connection, _Hello] = {}

    def begin(self, connection: Connection, server: int, received: int = 0) -> None:
        """Queues a hello to a server, from which this worker has `received` so many bytes over
        links that have ended."""
        words = encode(DataHello(self._rank, self._settings, self._process, received))
        said = self._hellos[connection] = _Hello(Proofs(self._key, server), nonce(), words)
        hello = said.nonce + said.proofs.hello(self._rank, said.nonce)
        header = HelloHeader(Kind.HELLO, self._rank, magic=MAGIC, version=PROTOCOL_VERSION)
        connection.writer.push(Frame(URGENT, header, memoryview(hello)))

    def land_challenge(self, connection: Connection, header: Header) -> Landing:
        """Lands a server's challenge."""
        if header.payload_bytes != CHALLENGE_BYTES:
            raise ProtocolError(f"it sent a challenge of {header.payload_bytes} bytes")
        return new_memory(header)

    def answer(self, connection: Connection, header: Header, challenge: memoryview) -> None:
        """Answers a challenge; ProtocolError if it is not of a server of this job."""
        proofs, workers_nonce, words = self._hellos.pop(connection)
        servers_nonce, proof = bytes(challenge[:NONCE_BYTES]), bytes(challenge[NONCE_BYTES:])
        if not is_right(proof, proofs.challenge(self._rank, workers_nonce, servers_nonce)):
            raise ProtocolError(
                "what answers in its place does not know the job's secret. Is its address that of "
                "another program, or of another job?"
            )
        answer = proofs.answer(self._rank, workers_nonce, servers_nonce, words)
        proves = Header(Kind.PROOF, self._rank)
        connection.writer.push(Frame(URGENT, proves, memoryview(answer + words)))

    def forget(self, connection: Connection) -> None:
        """The connection has ended before the handshake was complete."""
        self._hellos.pop(connection, None)
