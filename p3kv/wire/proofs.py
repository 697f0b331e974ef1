"""How the two ends of a data connection show each other that they belong to the job.

1. HELLO, from the worker: a random number, the worker's nonce, and a proof that it has the key.
   Whoever does not gets no answer.
2. CHALLENGE, from the server: a nonce of its own, and a proof over both.
3. PROOF, from the worker: a proof over both nonces and over its first words, which follow.

A proof is an HMAC over what it is for, both ranks and the nonces. So none can be used again: not on
another connection, nor for another process, nor sent back to the process that has made it. A HELLO
can be repeated by somebody who has seen it; only a process that has the key answers the challenge.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from hashlib import sha256

from p3kv.wire.messages import PROTOCOL_VERSION

NONCE_BYTES = 32
PROOF_BYTES = sha256().digest_size
HELLO_BYTES = CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES

_ABOUT = struct.Struct("<16sIII")
"""Purpose of the proof, protocol, ranks of server and worker."""


def nonce() -> bytes:
    """A number that nobody can guess, and that never comes twice."""
    return secrets.token_bytes(NONCE_BYTES)


class Proofs:
    """Makes the proofs of all connections to one server; both ends make the same."""

    def __init__(self, key: bytes, server: int) -> None:
        """`key` is the job's (`Credentials.data_key`), `server` the server's rank."""
        self._key = key
        self._server = server

    def hello(self, worker: int, workers_nonce: bytes) -> bytes:
        """The proof in a HELLO."""
        return self._made(b"hello", worker, workers_nonce)

    def challenge(self, worker: int, workers_nonce: bytes, servers_nonce: bytes) -> bytes:
        """The proof in a CHALLENGE."""
        return self._made(b"challenge", worker, workers_nonce + servers_nonce)

    def answer(
        self, worker: int, workers_nonce: bytes, servers_nonce: bytes, words: bytes
    ) -> bytes:
        """The proof in a PROOF, before the worker's first words."""
        return self._made(b"answer", worker, workers_nonce + servers_nonce + words)

    def _made(self, purpose: bytes, worker: int, over: bytes) -> bytes:
        about = _ABOUT.pack(purpose, PROTOCOL_VERSION, self._server, worker)
        return hmac.new(self._key, about + over, sha256).digest()


def is_right(proof: bytes, expected: bytes) -> bool:
    """Compares in a time that tells nothing of where they differ."""
    return hmac.compare_digest(proof, expected)
