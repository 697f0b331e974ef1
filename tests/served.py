"""One real server, with a test in the place of the scheduler and of the workers."""

from __future__ import annotations

import sys
import time
from typing import Any, Tuple

import numpy as np
import zmq

from p3kv.codecs import make_codecs
from p3kv.wire.header import MAGIC, Kind, pack_header
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Alive,
    DataHello,
    Hello,
    JobSettings,
    Roster,
    ToScheduler,
    Welcomed,
    decode,
    encode,
)
from tests.jobs import SCRIPTS, end, start_role

TOLD_S = 20.0
AS_IT_IS = make_codecs("identity", "identity", 0, np.dtype(np.float32))
TOKEN = bytes(range(TOKEN_BYTES))


def frame(kind: Kind, rank: int, payload: bytes = b"", **fields: int) -> bytes:
    """A frame on a data connection."""
    return pack_header(kind, rank, payload_bytes=len(payload), **fields) + payload


def hello(rank: int, **settings: Any) -> bytes:
    """What makes a worker of a connection."""
    payload = TOKEN + encode(DataHello(rank, JobSettings(**settings)))
    return frame(Kind.HELLO, rank, payload, key=MAGIC, slice=PROTOCOL_VERSION)


class Served:
    """A server that takes the test for its scheduler, and so for its workers what the test says."""

    def __init__(self, workers: int) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        serve = [sys.executable, str(SCRIPTS / "join.py")]
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.server = start_role("server", serve, port, workers=workers)
        self._workers = workers
        self.identity = b""

    def welcome(self) -> Tuple[str, int]:
        """Lets the server in; returns where it listens."""
        hello = self.hear()
        assert isinstance(hello, Hello)
        address = (hello.host, hello.port)
        names = [f"worker {rank}" for rank in range(self._workers)]
        for message in (Welcomed(), Roster(0, TOKEN, [(*address, "tcp")], names)):
            self.say(message)
        return address

    def say(self, message: Any) -> None:
        self._router.send_multipart([self.identity, encode(message)])

    def hear(self) -> Any:
        """What the server says next, but for its word that it is there."""
        deadline = time.monotonic() + TOLD_S
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            assert self._router.poll(left_s * 1000), "the server says nothing"
            self.identity, data = self._router.recv_multipart()
            message = decode(data, ToScheduler)
            if not isinstance(message, Alive):
                return message

    def close(self) -> None:
        self._context.destroy()
        end(self.server)
