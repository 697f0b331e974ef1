"""The pace of new values: no worker is far ahead of another, and none that is gone holds others."""

from __future__ import annotations

import socket
from typing import Iterator, List, Tuple

import numpy as np
import pytest

from p3kv.server.broadcasts import Broadcasts
from p3kv.server.buffers import Buffer, BufferPool
from p3kv.wire.connection import Connection
from p3kv.wire.loop import Loop
from p3kv.wire.messages import Kind, pack_header, unpack_header

VALUE_BYTES = 1 << 20
LEAD_VALUES, MOST_LEAD_VALUES = 3, 8
HEADER = pack_header(Kind.UPDATED, 0, payload_bytes=VALUE_BYTES)
FRAME_BYTES = len(HEADER) + VALUE_BYTES


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def broadcasts() -> Broadcasts:
    made = Broadcasts()
    made.set_lead(LEAD_VALUES * VALUE_BYTES, MOST_LEAD_VALUES * VALUE_BYTES)
    return made


def _worker(loop: Loop) -> Tuple[Connection, socket.socket]:
    """A connection that `loop` serves, and the socket of the worker, who takes little unread."""
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.socket()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    far.connect(listener.getsockname())
    near = listener.accept()[0]
    listener.close()
    connection = Connection(near, lambda *_: None, lambda *_: None, lambda *_: None, 8192)
    loop.add_connection(connection)
    return connection, far


def _values(count: int) -> List[Buffer]:
    pool = BufferPool()
    return [pool.get(VALUE_BYTES, np.dtype("uint8")) for _ in range(count)]


def _run(loop: Loop, far: socket.socket) -> bytes:
    """Serves for a while in which the worker at `far` reads; returns what it got."""
    received = bytearray()
    far.setblocking(False)

    def read() -> None:
        received.extend(far.recv(1 << 20))

    loop.add_reader(far.fileno(), read)
    loop.call_later(0.5, loop.stop)
    loop.run()
    loop.remove_reader(far.fileno())
    return bytes(received)


@pytest.mark.parametrize(
    "count, ahead",
    [
        (4, 4),
        (20, LEAD_VALUES + 13 // 4 + 1),  # a quarter of the 13 that wait
        (60, MOST_LEAD_VALUES + 1),
    ],
)
def test_no_worker_is_ahead_of_another_by_more_than_the_lead(
    loop: Loop, broadcasts: Broadcasts, count: int, ahead: int
) -> None:
    (reading, near), (idle, far) = _worker(loop), _worker(loop)
    for number, value in enumerate(_values(count)):
        broadcasts.send(-number, HEADER, value, [reading, idle])
    # One value more than the lead, because a value is never divided.
    assert len(_run(loop, near)) == ahead * FRAME_BYTES
    behind_bytes = len(_run(loop, far))
    assert min(count, ahead + 1) * FRAME_BYTES <= behind_bytes <= 2 * ahead * FRAME_BYTES
    near.close()
    far.close()


def test_a_more_urgent_value_overtakes_all_that_have_not_begun(
    loop: Loop, broadcasts: Broadcasts
) -> None:
    connection, far = _worker(loop)
    broadcasts.send(9, HEADER, _values(1)[0], [])  # wanted by nobody
    for urgency in (1, 1, 1, 1, 2, 3):  # the lead lets the last two wait
        header = pack_header(Kind.UPDATED, 0, priority=urgency, payload_bytes=VALUE_BYTES)
        broadcasts.send(urgency, header, _values(1)[0], [connection])
    stream = _run(loop, far)
    headers = [unpack_header(memoryview(stream), at) for at in range(0, len(stream), FRAME_BYTES)]
    assert [header.priority for header in headers] == [1, 3, 2, 1, 1, 1]
    far.close()


def test_a_worker_that_is_gone_holds_nobody_back(loop: Loop, broadcasts: Broadcasts) -> None:
    (reading, near), (gone, far) = _worker(loop), _worker(loop)
    values = _values(12)
    for value in values:
        broadcasts.send(0, HEADER, value, [gone, reading])
    received_bytes = len(_run(loop, near))
    assert received_bytes < len(values) * FRAME_BYTES
    far.close()
    loop.remove_connection(gone)
    broadcasts.forget(gone)
    received_bytes += len(_run(loop, near))
    assert received_bytes == len(values) * FRAME_BYTES
    assert not any(value.sending for value in values)
    near.close()
