"""Keys that follow from the job's secret, for both kinds of connections; none of them is sent.

The connection to the scheduler is ZeroMQ's CURVE (Curve25519): each side shows that it has the
secret key to its public key, and all messages are encrypted and authenticated. Scheduler and nodes
have a key pair each. Both pairs follow from the secret. So whoever has it knows all four keys, and
nobody else knows any: a stranger can't even make a hello that the scheduler reads.

Data connections have proofs of their own (`p3kv.wire.proofs`), and a key for a transport that
encrypts (`p3kv.transport.tls`).
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import NamedTuple

import zmq
from zmq.utils import z85

from p3kv.errors import ConfigError


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
