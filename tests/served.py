"""One real server or worker, with a test in the place of all other processes."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any, List, Tuple, Type

import zmq

from p3kv.wire.credentials import NONCE_BYTES, Credentials, Proofs
from p3kv.wire.fields import Header
from p3kv.wire.header import HEADER_BYTES, MAGIC, Kind, pack_header, unpack_header
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    Agreed,
    Alive,
    DataHello,
    DataWelcome,
    Hello,
    JobSettings,
    Ready,
    Roster,
    ToScheduler,
    Welcomed,
    decode,
    encode,
)
from p3kv.wire.scheduler_socket import Session
from tests.jobs import SCRIPTS, SECRET, SUMS_ONLY, end, start_role

TOLD_S = 60.0
_CREDENTIALS = Credentials(SECRET.encode())
TOKEN = bytes(range(TOKEN_BYTES))
KEY = _CREDENTIALS.data_key(TOKEN)
"""That of proofs on data connections."""
PROCESS = bytes(range(1, 1 + TOKEN_BYTES))
"""What each worker's process has chosen."""


def header_of(kind: int) -> Type[Header]:
    """The header of a kind of frames, which need not be one."""
    return kind.header if isinstance(kind, Kind) else Header


def own_fields(kind: int) -> Tuple[str, ...]:
    """The numbers in the header of a kind that not all have."""
    return header_of(kind).__struct_fields__[len(Header.__struct_fields__) :]


def packed(kind: int, rank: int, payload_bytes: int = 0, **fields: int) -> bytes:
    """A header on a data connection."""
    return pack_header(header_of(kind)(kind, rank, **fields), payload_bytes, received=0)


def frame(kind: int, rank: int, payload: bytes = b"", **fields: int) -> bytes:
    """A frame on a data connection."""
    return packed(kind, rank, len(payload), **fields) + payload


def received(link: socket.socket) -> Tuple[Header, bytes]:
    """The next frame on a data connection."""
    header = unpack_header(memoryview(link.recv(HEADER_BYTES, socket.MSG_WAITALL)), 0)
    return header, link.recv(header.payload_bytes, socket.MSG_WAITALL)


def hello(rank: int, workers_nonce: bytes = bytes(NONCE_BYTES), key: bytes = KEY) -> bytes:
    """A worker's first word to server 0."""
    payload = workers_nonce + Proofs(key, 0).hello(rank, workers_nonce)
    return frame(Kind.HELLO, rank, payload, magic=MAGIC, version=PROTOCOL_VERSION)


def proof(
    rank: int,
    challenge: bytes,
    workers_nonce: bytes = bytes(NONCE_BYTES),
    key: bytes = KEY,
    had: int = 0,
    process: bytes = PROCESS,
    **settings: Any,
) -> bytes:
    """A worker's answer to the challenge of server 0."""
    words = encode(DataHello(rank, JobSettings(**settings), process, had))
    servers_nonce = challenge[:NONCE_BYTES]
    answer = Proofs(key, 0).answer(rank, workers_nonce, servers_nonce, words)
    return frame(Kind.PROOF, rank, answer + words)


def welcome(server: int, had: int = 0) -> bytes:
    """A server's answer to a worker's proof; it has had so many bytes before."""
    return frame(Kind.WELCOME, server, encode(DataWelcome(had)))


def shake_hands(link: socket.socket, rank: int, **settings: Any) -> None:
    """Makes a worker of a connection to server 0."""
    link.sendall(hello(rank))
    header, challenge = received(link)
    assert header.kind == Kind.CHALLENGE
    link.sendall(proof(rank, challenge, **settings))


def challenge(link: socket.socket, server: int) -> None:
    """Makes a server of a connection that worker 0 has opened."""
    header, payload = received(link)
    assert header.kind == Kind.HELLO
    workers_nonce, servers_nonce = payload[:NONCE_BYTES], bytes(NONCE_BYTES)
    proof = Proofs(KEY, server).challenge(header.rank, workers_nonce, servers_nonce)
    link.sendall(frame(Kind.CHALLENGE, server, servers_nonce + proof))


class Scheduled:
    """One process that takes the test for its scheduler."""

    def __init__(
        self,
        role: str,
        workers: int = 1,
        servers: int = 1,
        script: str = "join.py",
        **settings: Any,
    ) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        _CREDENTIALS.protect_router(self._router)
        command = [sys.executable, str(SCRIPTS / script)]
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.process = start_role(role, command, port, workers, servers, **settings)
        self.identity = b""
        self._session = Session()

    def say(self, message: Any) -> None:
        data = encode(message)
        parts = [data] if isinstance(message, Welcomed) else self._session.keep(data)
        self._router.send_multipart([self.identity, *parts])

    def hear(self) -> Any:
        """What the process says next, but for its word that it is there."""
        deadline = time.monotonic() + TOLD_S
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            assert self._router.poll(left_s * 1000), "the process says nothing"
            self.identity, data, *numbers = self._router.recv_multipart()
            for number in numbers:
                self._session.take(number)
            message = decode(data, ToScheduler)
            if not isinstance(message, Alive):
                return message

    def close(self) -> None:
        self._context.destroy()
        end(self.process)


class Served(Scheduled):
    """A server; the test is its workers as well."""

    def __init__(self, workers: int) -> None:
        super().__init__("server", workers, **SUMS_ONLY)
        self._workers = workers

    def welcome(self) -> Tuple[str, int]:
        """Lets the server in; returns where it listens."""
        hello = self.hear()
        assert isinstance(hello, Hello)
        address = (hello.host, hello.port)
        names = [f"worker {rank}" for rank in range(self._workers)]
        for message in (Welcomed(), Roster(0, TOKEN, [(*address, "tcp")], names)):
            self.say(message)
        return address


class Serving(Scheduled):
    """Worker 0; the test is its servers as well, all at one address."""

    def __init__(self, servers: int, **settings: Any) -> None:
        super().__init__("worker", 1, servers, **{"P3KV_SLICE_SIZE": 100, **settings})
        self._servers = servers
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=servers)
        self._listener.settimeout(TOLD_S)

    def links(self) -> List[socket.socket]:
        """Lets the worker in; returns its connections to the servers, by their ranks, on which both
        know each other."""
        links = self.connections()
        for rank, link in enumerate(links):
            challenge(link, rank)
        return links

    def connections(self) -> List[socket.socket]:
        """Lets the worker in; returns its connections to the servers, by their ranks, on which it
        says hello."""
        assert isinstance(self.hear(), Hello)
        servers = [(*self._listener.getsockname(), "tcp")] * self._servers
        for message in (Welcomed(), Roster(0, TOKEN, servers, ["worker 0"])):
            self.say(message)
        assert isinstance(self.hear(), Ready)
        self.say(Agreed())
        return [self._listener.accept()[0] for _ in servers]

    def refuse(self) -> socket.socket:
        """Refuses new connections, until the socket that it returns listens."""
        address = self._listener.getsockname()
        self._listener.close()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(address)
        return self._listener

    def close(self) -> None:
        self._listener.close()
        super().close()
