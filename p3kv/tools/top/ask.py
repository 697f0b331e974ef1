"""Asks a job's scheduler what all processes have measured."""

from __future__ import annotations

import zmq

from p3kv.common.addresses import endpoint
from p3kv.config import Launch
from p3kv.errors import PeerLostError
from p3kv.wire.address import scheduler_address
from p3kv.wire.credentials import Credentials
from p3kv.wire.messages import MAX_MESSAGE_BYTES, AskReports, Reports, decode, encode

PATIENCE_MS = 10_000
"""How long the scheduler may take to answer."""


class Asker:
    """A connection to the scheduler of a job, as one who does not belong to it."""

    def __init__(self, launch: Launch) -> None:
        self._at = endpoint(launch.root_host, launch.root_port)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        Credentials(launch.common_secret).protect_dealer(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(f"tcp://{scheduler_address(launch)}")

    def ask(self) -> Reports:
        """Asks for the last reports of all processes; PeerLostError without an answer."""
        self._socket.send(encode(AskReports()))
        if not self._socket.poll(PATIENCE_MS):
            raise PeerLostError(
                f"the scheduler at {self._at} does not answer: it has ended, or it can't be "
                "reached, or it is of another version of p3kv"
            )
        answer: Reports = decode(self._socket.recv(), Reports)
        return answer

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        self._socket.close()
        self._context.term()
