"""Who belongs to the job: keys that follow from its secret, and proofs on data connections.

The connection to the scheduler is ZeroMQ's CURVE (Curve25519): each side shows that it has the
secret key to its public key, and all messages are encrypted and authenticated. Scheduler and nodes
have a key pair each. Both pairs follow from the secret. So whoever has it knows all four keys, and
nobody else knows any: a stranger can't even make a hello that the scheduler reads.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import struct
from hashlib import sha256
from typing import NamedTuple

import zmq
from zmq.utils import z85

from p3kv.errors import ConfigError
from p3kv.wire.messages import PROTOCOL_VERSION


class _Pair(NamedTuple):
    public: bytes
    secret: bytes


class Credentials:
    """The keys of one job. Two processes have the same if they have the same secret."""

    def __init__(self, secret: bytes) -> None:
        """Raises ConfigError where ZeroMQ was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError(
                "the ZeroMQ of this Python has no CURVE, which p3kv needs. Install pyzmq from "
                "PyPI as it is: its wheels have it"
            )
        self._secret = secret
        self._scheduler = self._pair("scheduler")
        self._node = self._pair("node")

    def protect_router(self, router: zmq.Socket) -> None:
        """Has the scheduler's socket take nothing but connections of nodes; before it is bound."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._scheduler.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"p3kv")  # or nobody would be asked who may connect

    def protect_dealer(self, dealer: zmq.Socket) -> None:
        """Has a node's socket speak with the job's scheduler only; before it is connected."""
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self._scheduler.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._node.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._node.secret)

    def are_of_a_node(self, public_key: bytes) -> bool:
        """Whether a peer's public key, as ZeroMQ has checked it, is that of the job's nodes."""
        return hmac.compare_digest(z85.encode(public_key), self._node.public)

    def data_key(self, token: bytes) -> bytes:
        """The key of proofs on data connections; of one run only, as the token is."""
        return self._derived("data", token)

    def mark(self, token: bytes, who: str) -> bytes:
        """16 bytes that name the file by which a process, such as "server 0", shows its folder of
        checkpoints; of one run only."""
        return self._derived(f"mark of {who}", token)[:16]

    def transport_key(self) -> bytes:
        """32 bytes for transports that encrypt."""
        return self._derived("transport")

    def _pair(self, role: str) -> _Pair:
        secret = z85.encode(self._derived(role))
        return _Pair(zmq.curve_public(secret), secret)

    def _derived(self, purpose: str, more: bytes = b"") -> bytes:
        return hmac.new(self._secret, f"p3kv {purpose}\0".encode() + more, sha256).digest()


NONCE_BYTES = 32
PROOF_BYTES = sha256().digest_size
HELLO_BYTES = CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES

_ABOUT = struct.Struct("<16sIII")
"""Purpose of the proof, protocol, ranks of server and worker."""


def nonce() -> bytes:
    """A number that nobody can guess, and that never comes twice."""
    return secrets.token_bytes(NONCE_BYTES)


class Proofs:
    """Makes proofs that both ends of a connection with a server have the job's key.

    1. HELLO, from the worker: a random number, the worker's nonce, and a proof that it has the key.
       Whoever does not gets no answer.
    2. CHALLENGE, from the server: a nonce of its own, and a proof over both.
    3. PROOF, from the worker: a proof over both nonces and over its first words, which follow.

    A proof is an HMAC over its purpose, both ranks and the nonces. So none can be used again: not
    on another connection, nor for another process, nor sent back to the process that has made it. A
    HELLO can be repeated by somebody who has seen it; only a process that has the key answers the
    challenge.
    """

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


_MOST_REFUSAL_CHARS = 600


class Refusals:
    """Logs the 1st, 2nd, 4th, 8th ... refused connection, cut to `_MOST_REFUSAL_CHARS`: nobody can
    fill a disk by connecting."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def note(self, reason: str) -> None:
        """Counts a refusal; `reason` says what was wrong with the connection."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            self._log.warning(
                "refused a connection (number %d): %s", self._count, reason[:_MOST_REFUSAL_CHARS]
            )
