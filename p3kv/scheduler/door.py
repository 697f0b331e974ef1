"""Who may speak to the scheduler: ZeroMQ asks for each connection (ZAP, ZeroMQ's RFC 27)."""

from __future__ import annotations

import zmq

from p3kv.wire.credentials import Credentials

_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks. No other process can reach it."""


class Door:
    """Lets in those that have shown that they have the nodes' key.

    Belongs to the scheduler's thread.
    """

    def __init__(self, context: zmq.Context, credentials: Credentials) -> None:
        """To be made before the scheduler's socket is bound, in the same context."""
        self._credentials = credentials
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answers one question; to be called when `socket` is readable."""
        version, request, _, _, _, mechanism, *shown = self.socket.recv_multipart()
        known = (
            mechanism == b"CURVE" and len(shown) == 1 and self._credentials.are_of_a_node(shown[0])
        )
        status = (b"200", b"") if known else (b"400", b"not a process of this job")
        self.socket.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        """Lets nobody in any more."""
        self.socket.close(0)
