"""Next gradients wait while a server's host still gets old values, and never for long."""

from __future__ import annotations

import socket
import time
from typing import Dict, Iterator, List, cast

import pytest

from p3kv.server.workers import Workers
from p3kv.transport import SocketLink
from p3kv.wire.connection import Connection
from p3kv.wire.control import ControlClient
from p3kv.wire.fields import PushHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import HEADER_BYTES, LAST_ROUND, Kind, unpack_header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN
from p3kv.wire.protocol import FROM_SERVERS, Conversation
from p3kv.worker.egress import Egress
from tests.handling import Nobody
from tests.jobs import DEADLINE_S

HERE, THERE = 0, 1
RANK = 5
MANY, FEW = 4 << 20, 1000


class Servers:
    """A worker's connections to a server of its own host and another one, and their far ends."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.connections: Dict[int, Connection] = {}
        self._far: Dict[int, socket.socket] = {}
        for server in (HERE, THERE):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                near = socket.create_connection(listener.getsockname())
                self._far[server] = listener.accept()[0]
            self._far[server].setblocking(False)
            connection = Connection(
                SocketLink(near), Conversation(FROM_SERVERS, "server"), Nobody(), 65536
            )
            self.connections[server] = connection
            self.loop.add_connection(connection)
        self.egress = Egress(RANK, self.connections, [HERE], self.loop)
        self.egress.begin(0, MANY)

    def push(self, server: int, *steps: int, size_bytes: int = MANY) -> None:
        for step in steps:
            self.egress.begin(step, size_bytes)
            frame = Frame(-step, PushHeader(Kind.PUSH, RANK, step=step))
            self.egress.push(server, step, frame)

    def gets(self, server: int, kind: Kind = Kind.PUSH) -> List[int]:
        """The steps of what a server gets of this kind, in this order."""
        self.loop.call_later(0.02, self.loop.stop)
        self.loop.run()
        try:
            data = memoryview(self._far[server].recv(65536))
        except BlockingIOError:
            return []
        headers = [unpack_header(data, at) for at in range(0, len(data), HEADER_BYTES)]
        return [header.step for header in headers if header.kind == kind]

    def close(self) -> None:
        self.loop.close()
        for far in self._far.values():
            far.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def test_a_server_that_says_nothing_is_open(servers: Servers) -> None:
    servers.push(THERE, 1, 2)
    assert servers.gets(THERE) == [1, 2]


def test_steps_wait_until_their_server_is_open_for_them(servers: Servers) -> None:
    servers.egress.open(THERE, 3)
    servers.push(THERE, 3, 4, 5, 4)
    assert servers.gets(THERE) == [3]
    servers.egress.open(THERE, 4)
    assert servers.gets(THERE) == [4, 4]
    servers.push(THERE, 4)
    servers.egress.open(THERE, LAST_ROUND)
    servers.push(THERE, 6)
    assert servers.gets(THERE) == [4, 5, 6]


def test_words_that_are_overtaken_close_nothing(servers: Servers) -> None:
    servers.egress.open(THERE, 4)
    servers.egress.open(THERE, 2)
    servers.push(THERE, 4)
    assert servers.gets(THERE) == [4]


def test_no_link_leads_to_a_server_of_the_same_host(servers: Servers) -> None:
    servers.egress.open(HERE, 1)
    servers.push(HERE, 2)
    assert servers.gets(HERE) == [2]


def test_a_gate_that_stays_closed_opens_after_a_second(servers: Servers) -> None:
    servers.egress.open(THERE, 1)
    start = time.monotonic()
    servers.push(THERE, 2)
    got: List[int] = []
    while not got and time.monotonic() - start < DEADLINE_S:
        got = servers.gets(THERE)
    assert got == [2]
    assert time.monotonic() - start > 0.95
    servers.push(THERE, 2, 3)
    assert servers.gets(THERE) == [2]


def test_a_worker_tells_the_servers_of_its_host_once(servers: Servers) -> None:
    servers.egress.begin(1, MANY)  # whatever it still waits for, it goes on
    servers.egress.begin(1, MANY)
    assert servers.gets(HERE, Kind.OPEN) == [1]
    servers.egress.values_complete()
    assert servers.gets(HERE, Kind.OPEN) == [2]
    servers.egress.values_complete()
    servers.egress.begin(2, MANY)
    assert servers.gets(HERE, Kind.OPEN) == []
    servers.egress.values_complete()  # before the rest of the round has begun
    assert servers.gets(HERE, Kind.OPEN) == []
    servers.egress.begin(2, MANY)
    servers.egress.values_complete()
    assert servers.gets(HERE, Kind.OPEN) == [3]
    assert servers.gets(THERE, Kind.OPEN) == []


def test_nothing_is_told_after_the_goodbye(servers: Servers) -> None:
    servers.push(HERE, 1)
    assert servers.gets(HERE, Kind.OPEN) == [1]
    servers.egress.say_goodbye()
    servers.egress.values_complete()  # a last value has arrived that nobody waits for
    assert servers.gets(HERE, Kind.OPEN) == []


def test_nothing_overtakes_what_is_held_of_an_older_step(servers: Servers) -> None:
    servers.egress.open(THERE, 1)
    servers.push(THERE, 2, size_bytes=FEW)
    assert servers.gets(THERE) == []
    servers.push(THERE, 3)  # after few values, for which nobody waits
    assert servers.gets(THERE) == [2, 3]


def test_there_are_no_gates_after_a_step_with_few_values(servers: Servers) -> None:
    servers.egress.open(THERE, 1)
    servers.egress.begin(2, FEW)
    servers.push(THERE, 3)
    assert servers.gets(THERE) == [3]
    assert servers.gets(HERE, Kind.OPEN) == [2]
    servers.push(THERE, 4)
    assert servers.gets(THERE) == []
    servers.egress.open(THERE, 4)
    assert servers.gets(THERE) == [4]


def test_a_server_is_open_when_all_workers_of_its_host_are(servers: Servers) -> None:
    workers = Workers(servers.loop, cast(ControlClient, None), 1.0)
    assert workers.open_step == UNKNOWN
    workers.needs_no_values_before(2, 7)
    workers.needs_no_values_before(0, 6)
    assert workers.open_step == 6
    workers.needs_no_values_before(0, 8)
    assert workers.open_step == 7
    workers.end(1)  # of another host
    workers.end(2)
    assert workers.open_step == 8
    workers.end(0)
    assert workers.open_step == LAST_ROUND
