"""The event loop: calls, timers and sockets in one thread, and who counts as late."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from functools import partial
from typing import Iterator, List, Tuple

import pytest

from p3kv.transport import SocketLink
from p3kv.wire.connection import Connection, held_by
from p3kv.wire.fields import PushHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import HEADER_BYTES, Kind
from p3kv.wire.loop import Loop
from p3kv.wire.protocol import FROM_SERVERS, Conversation
from tests.handling import Nobody, Told

DEADLINE_S = 60.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    # A loop that nobody stops would hang the test.
    made.call_later(DEADLINE_S, made.stop)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[List[socket.socket]]:
    ends = list(socket.socketpair())
    yield ends
    for end in ends:
        end.close()


def test_calls_from_other_threads_come_in_order_and_wake_the_loop(loop: Loop) -> None:
    seen: List[int] = []

    def call() -> None:
        for number in range(1000):
            loop.call_soon(seen.append, number)
        loop.call_soon(loop.stop)

    caller = threading.Timer(0.05, call)
    caller.start()
    start = time.monotonic()
    loop.run()
    caller.join()
    assert seen == list(range(1000))
    assert time.monotonic() - start < DEADLINE_S / 2


def test_calls_together_wait_for_those_that_follow_closely(loop: Loop) -> None:
    made: List[int] = []
    made_at_first: List[int] = []  # how many were made when the loop called the first one

    def call() -> None:
        for _ in range(20):
            made.clear()
            loop.call_soon_batched(lambda: made_at_first.append(len(made)))
            for number in range(100):
                loop.call_soon_batched(int)
                made.append(number)
            time.sleep(0.02)
        loop.call_soon(loop.stop)

    caller = threading.Timer(0.05, call)
    caller.start()
    loop.run()
    caller.join()
    # The machine may stop the caller between two calls, but not in most of its bursts.
    assert statistics.median(made_at_first) == 100


def test_calls_together_are_made_at_once_when_their_batch_has_ended(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_s: List[float] = []
    monkeypatch.setattr(time, "sleep", pauses_s.append)
    for _ in range(3):
        loop.call_soon_batched(int)
    loop.call_soon_batched(loop.stop)
    loop.end_batch()
    loop.run()
    assert not pauses_s


def test_calls_together_keep_their_place_among_all_calls(loop: Loop) -> None:
    seen: List[int] = []

    def call() -> None:
        for number in range(1000):
            (loop.call_soon_batched if number % 3 else loop.call_soon)(seen.append, number)
        loop.call_soon(loop.stop)

    caller = threading.Timer(0.05, call)
    caller.start()
    loop.run()
    caller.join()
    assert seen == list(range(1000))


def test_calls_together_that_never_end_wait_for_some_milliseconds_only(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: List[float] = []
    deadline = time.monotonic() + DEADLINE_S / 2
    sleep = time.sleep

    def called() -> None:
        heard.append(time.monotonic())
        loop.stop()

    def another_comes(pause_s: float) -> None:
        """Whenever the loop has paused for another call, there is one."""
        sleep(pause_s)
        if not heard and time.monotonic() < deadline:
            loop.call_soon_batched(called)

    monkeypatch.setattr(time, "sleep", another_comes)
    loop.call_soon_batched(called)
    loop.run()
    assert heard[0] < deadline, "it waited until the calls ended"


def test_timers_come_in_order_of_their_times_and_then_of_the_calls(loop: Loop) -> None:
    seen: List[str] = []
    loop.call_later(0.04, lambda: seen.append("second"))
    loop.call_later(0.02, lambda: seen.append("first"))
    loop.call_later(0.04, lambda: seen.append("third"))
    loop.call_later(0.06, loop.stop)
    start = time.monotonic()
    loop.run()
    assert seen == ["first", "second", "third"]
    assert 0.06 <= time.monotonic() - start < DEADLINE_S / 2


def test_a_loop_with_work_serves_its_sockets_and_timers_as_well(
    loop: Loop, pair: List[socket.socket]
) -> None:
    seen = set()
    pieces = 0

    def work() -> bool:
        nonlocal pieces
        pieces += 1
        return True

    def read() -> None:
        seen.add(pair[0].recv(10))
        loop.remove_reader(pair[0].fileno())

    loop.add_reader(pair[0].fileno(), read)
    loop.call_later(0.02, lambda: seen.add(b"timer"))
    loop.call_later(0.05, loop.stop)
    pair[1].send(b"word")
    loop.run(work)
    assert seen == {b"word", b"timer"}
    assert pieces > 1


def test_words_that_came_in_time_are_heard_before_a_timer_says_they_did_not(
    loop: Loop, pair: List[socket.socket]
) -> None:
    """Also when the loop itself was busy for longer than the patience."""
    seen: List[str] = []

    def read() -> None:
        pair[0].recv(10)
        seen.append("heard")

    def busy() -> None:
        pair[1].send(b"in time")
        time.sleep(0.1)

    loop.add_reader(pair[0].fileno(), read)
    loop.call_later(0.05, lambda: seen.append("late"))
    loop.call_later(0.06, loop.stop)
    loop.call_soon(busy)
    loop.run()
    assert seen == ["heard", "late"]


def test_a_reader_that_is_removed_is_not_called(loop: Loop, pair: List[socket.socket]) -> None:
    seen: List[bytes] = []
    loop.add_reader(pair[0].fileno(), lambda: seen.append(pair[0].recv(10)))
    loop.remove_reader(pair[0].fileno())
    loop.remove_reader(pair[0].fileno())
    pair[1].send(b"word")
    loop.call_later(0.02, loop.stop)
    loop.run()
    assert seen == []


def _connected(loop: Loop) -> Tuple[Connection, socket.socket]:
    """A connection that `loop` serves, and the socket of a peer that never reads."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far = listener.accept()[0]
    listener.close()
    connection = Connection(SocketLink(near), Conversation(FROM_SERVERS, "server"), Nobody(), 8192)
    loop.add_connection(connection)
    return connection, far


def _queue(connection: Connection, priority: int, size_bytes: int) -> None:
    header, payload = PushHeader(Kind.PUSH, 0), memoryview(bytes(size_bytes))
    connection.writer.push(Frame(priority, header, payload))


def test_what_overtakes_a_more_urgent_frame_on_a_full_connection_is_counted(loop: Loop) -> None:
    (full, far), (free, other_far) = _connected(loop), _connected(loop)
    _queue(full, 9, 64 << 20)  # more than the kernel takes on both sides
    _queue(full, 8, 100)
    loop.call_later(0.05, lambda: _queue(free, 8, 1000))  # as urgent: overtakes nothing
    loop.call_later(0.10, lambda: _queue(free, 7, 2000))
    loop.call_later(0.15, lambda: _queue(free, 9, 3000))
    loop.call_later(0.20, loop.stop)
    loop.run()
    assert full.blocked and not free.writer
    assert (loop.inversions.frames, loop.inversions.bytes) == (1, HEADER_BYTES + 2000)
    far.close()
    other_far.close()


def test_what_a_link_did_not_take_before_the_loop_runs_is_sent_by_the_loop(loop: Loop) -> None:
    connection, far = _connected(loop)
    _queue(connection, 0, size_bytes := 1 << 20)
    loop.send_now(connection)
    assert connection.blocked
    got = 0

    def read() -> None:
        nonlocal got
        got += len(far.recv(1 << 20))
        if got == size_bytes + HEADER_BYTES:
            loop.stop()

    loop.add_reader(far.fileno(), read)
    loop.run()
    assert got == size_bytes + HEADER_BYTES and not connection.blocked
    far.close()


class _Counting(Connection):
    sends = 0

    def send(self) -> int:
        self.sends += 1
        return super().send()


@pytest.mark.parametrize("read_bytes", [1 << 20, 2048])
def test_a_fast_link_takes_a_large_frame_in_few_bites_and_begins_no_other_meanwhile(
    loop: Loop, read_bytes: int
) -> None:
    fast = read_bytes > 1 << 16
    size_bytes, frames, credit_bytes = (1 << 20, 8, 16_384) if fast else (1 << 19, 1, 65_536)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    if not fast:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    conversation = Conversation(FROM_SERVERS, "server")
    connection = _Counting(SocketLink(near), conversation, Nobody(), 8192)
    connection.hold_at_most(credit_bytes)
    loop.add_connection(connection)
    held: List[int] = []

    def payload() -> memoryview:
        held.append(held_by(near.fileno()))
        return memoryview(bytes(size_bytes))

    for _ in range(frames):
        connection.writer.push(Told(0, PushHeader(Kind.PUSH, 0), make=payload))
    left = frames * (size_bytes + HEADER_BYTES)

    def read() -> None:
        nonlocal left
        if not fast:
            held.append(held_by(near.fileno()))
            time.sleep(0.0005)
        left -= len(far.recv(read_bytes))
        if not left:
            loop.stop()

    loop.add_reader(far.fileno(), read)
    loop.run()
    assert left == 0 and max(held) <= 3 * credit_bytes
    if fast:
        assert connection.sends < frames * size_bytes // credit_bytes // 4
    far.close()


def test_of_frames_as_urgent_that_goes_whose_connection_has_sent_nothing_for_longest(
    loop: Loop,
) -> None:
    connections, sockets = zip(*(_connected(loop) for _ in range(3)))
    order: List[int] = []

    def queue(*numbers: int) -> None:
        for number in numbers:
            header = PushHeader(Kind.PUSH, 0)
            told = Told(0, header, sent=partial(order.append, number))
            connections[number].writer.push(told)

    for numbers in ((2, 1, 0), (0,), (0, 1, 2)):
        loop.call_soon(queue, *numbers)
        loop.call_later(0.0, loop.stop)  # when they are sent: timers come last in a turn
        loop.run()
    assert order == [0, 1, 2, 0, 1, 2, 0]
    for far in sockets:
        far.close()


def test_a_loop_may_be_closed_twice_and_called_afterwards() -> None:
    loop = Loop()
    loop.close()
    loop.close()
    loop.call_soon(print, "nobody hears it")


def test_a_closed_loop_runs_no_more() -> None:
    loop = Loop()
    loop.close()
    loop.run()


def test_a_loop_that_is_closed_while_it_runs_ends_without_an_error() -> None:
    loop = Loop()
    busy, closed = threading.Event(), threading.Event()
    errors: List[BaseException] = []

    def call() -> None:
        busy.set()
        closed.wait(DEADLINE_S)

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:  # noqa: BLE001  a thread's is nobody's
            errors.append(error)

    runner = threading.Thread(target=run)
    loop.call_soon(call)
    runner.start()
    assert busy.wait(DEADLINE_S)
    loop.close()
    closed.set()
    runner.join(DEADLINE_S)
    assert not runner.is_alive()
    assert errors == []
