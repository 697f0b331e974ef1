"""What p3kv needs of a transport: one suite that all of them pass, and a job with a user's own."""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator, List, Tuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from own_transport import UnixSockets
from p3kv.transport import MAX_ADDRESS, Link, Listener, Tcp, Transport
from p3kv.transport.tls import Tls
from tests.jobs import SCRIPTS, joined, run_job
from tests.memory_transport import Memory

sys.path.insert(0, str(SCRIPTS))
import exact_model

DEADLINE_S = 60.0
HOST = "127.0.0.1"
KEY = bytes(range(32))


def encrypted_tcp() -> Transport:
    return Tls(Tcp(), KEY)


def encrypted_memory() -> Transport:
    return Tls(Memory(), KEY)


Kind = Callable[[], Transport]
OVER_TCP = (Tcp, encrypted_tcp)
READY: Tuple[Kind, ...] = (*OVER_TCP, UnixSockets)
"""Transports that say by their descriptors when they are ready. In memory nothing wakes anybody:
there the test says when bytes go, and accepting takes no descriptor."""


@pytest.fixture(params=[*READY, Memory, encrypted_memory], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@pytest.fixture(params=READY, ids=lambda kind: kind.__name__)
def ready_kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@contextmanager
def listening(kind: Kind) -> Iterator[Listener]:
    listener = kind().listen(HOST)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def linked(kind: Kind) -> Iterator[Tuple[Link, Link]]:
    """Both ends of a link."""
    with listening(kind) as listener:
        near = kind().connect(listener.address, DEADLINE_S)
        (far,) = accepted(listener, 1)
    try:
        shake_hands(near, far)
        yield near, far
    finally:
        near.close()
        far.close()


def shake_hands(near: Link, far: Link) -> None:
    """Brings a byte from each end to the other, after which no handshake is under way."""
    assert carried(near, far, b"?") == b"?"
    assert carried(far, near, b"!") == b"!"


def carried(near: Link, far: Link, byte: bytes) -> bytes:
    """What comes at one end of a byte that the other end sends, if both ends listen."""
    assert near.send([memoryview(byte)]) == 1
    deadline = time.monotonic() + DEADLINE_S
    while not (heard := heard_now(far)):
        assert not heard_now(near)
        assert time.monotonic() < deadline
    return heard


def heard_now(link: Link, most_bytes: int = 1) -> bytes:
    buffer = bytearray(most_bytes)
    with suppress(BlockingIOError):
        return bytes(buffer[: link.receive_into([memoryview(buffer)])])
    return b""


def accepted(listener: Listener, count: int) -> List[Link]:
    """So many links, once they have come."""
    links: List[Link] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(links) < count:
        more, no_room = listener.accept(count - len(links))
        links += more
        assert not no_room and time.monotonic() < deadline
    return links


def received(link: Link, most_bytes: int = 1 << 20) -> bytes:
    """The bytes that come next; empty at the link's end."""
    buffer = bytearray(most_bytes)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with suppress(BlockingIOError):
            return bytes(buffer[: link.receive_into([memoryview(buffer)])])
        assert time.monotonic() < deadline
        select.select([link.descriptor], [], [], 0.01)


PIECE = memoryview(bytes(4096))


def fill(link: Link) -> int:
    """Sends until the link is full; returns how many bytes it has taken."""
    taken = 0
    with suppress(BlockingIOError):
        while True:
            taken += link.send([PIECE])
    return taken


def is_ready(descriptor: int, event: int, within_s: float = 0) -> bool:
    """Whether epoll says so of a descriptor, now or soon."""
    with select.epoll() as epoll:
        epoll.register(descriptor, event)
        return bool(epoll.poll(within_s))


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=8),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=3),
    st.integers(2_000, 200_000),
    st.booleans(),
)
def test_all_bytes_come_in_order_whatever_the_sizes_of_buffers(
    kind: Kind, sent: List[int], into: List[int], held_bytes: int, back: bool
) -> None:
    words = np.random.RandomState(sum(sent)).bytes(sum(sent))
    ends = np.cumsum([0, *sent])
    rest = [memoryview(words)[start:end] for start, end in zip(ends, ends[1:])]
    got = bytearray()
    with linked(kind) as pair:
        near, far = reversed(pair) if back else pair
        near.hold_at_most(held_bytes)
        deadline = time.monotonic() + DEADLINE_S
        while len(got) < len(words):
            assert time.monotonic() < deadline
            with suppress(BlockingIOError):
                count = near.send(rest) if rest else 0
                while count:
                    first = min(count, len(rest[0]))
                    rest[0] = rest[0][first:]
                    count -= first
                    if not rest[0]:
                        del rest[0]
            buffers = [bytearray(size) for size in into]
            with suppress(BlockingIOError):
                count = far.receive_into([memoryview(buffer) for buffer in buffers])
                assert count > 0
                got += b"".join(buffers)[:count]
        assert got == words


def test_a_link_without_bytes_or_without_room_says_so_and_goes_on(kind: Kind) -> None:
    with linked(kind) as (near, far):
        with pytest.raises(BlockingIOError):
            near.receive_into([memoryview(bytearray(1))])
        far.hold_at_most(8192)
        taken = fill(far)
        assert taken > 0
        with pytest.raises(BlockingIOError):
            far.send([PIECE])
        while taken:
            taken -= len(received(near, taken))
        rest = memoryview(bytes(PIECE) + b"more")
        assert far.send([rest]) == len(rest)
        got = b""
        while len(got) < len(rest):
            got += received(near)
        assert got == rest


def test_the_peer_s_end_comes_after_its_bytes(kind: Kind) -> None:
    with linked(kind) as (near, far):
        assert far.send([memoryview(b"last "), memoryview(b"words")]) in (5, 10)
        far.close()
        said = b""
        while more := received(near, 3):
            said += more
        assert said in (b"last ", b"last words")
        assert received(near) == b""


def test_sending_to_a_peer_that_has_gone_is_an_error(kind: Kind) -> None:
    with linked(kind) as (near, far):
        fill(near)
        far.close()  # with bytes that it has not received
        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(OSError) as told:
            while time.monotonic() < deadline:
                with suppress(BlockingIOError):
                    near.send([memoryview(b"anybody?")])
        assert not isinstance(told.value, BlockingIOError)


def test_a_link_takes_few_bytes_that_it_can_not_send(kind: Kind) -> None:
    """With a small limit fewer than with a large one, and no more than twice the limit and a page:
    Linux doubles what it is told, for its own notes."""
    taken = {}
    for limit_bytes in (16_384, 262_144):
        with linked(kind) as (near, far):
            near.hold_at_most(limit_bytes)
            taken[limit_bytes] = fill(near)
            at_peer = 0 if kind not in OVER_TCP else len(received(far, 1 << 24))
            assert taken[limit_bytes] - at_peer <= 2 * limit_bytes + 4096
    assert taken[16_384] < taken[262_144]


def test_a_link_may_be_closed_twice_and_does_nothing_afterwards(kind: Kind) -> None:
    with linked(kind) as (near, far):
        for _ in range(2):
            near.close()
            near.hold_at_most(10_000)
            near.wake_at(10_000)
        assert received(far) == b""
        with pytest.raises(OSError):
            near.send([memoryview(b"more")])
        with pytest.raises(OSError):
            near.receive_into([memoryview(bytearray(1))])


def test_a_listener_has_an_address_of_its_own_on_the_host(kind: Kind) -> None:
    with listening(kind) as one, listening(kind) as other:
        assert one.address != other.address
        for host, number in (one.address, other.address):
            assert host == HOST and 0 <= number <= MAX_ADDRESS


def test_a_listener_accepts_as_many_as_it_is_asked_for(kind: Kind) -> None:
    with listening(kind) as listener:
        assert listener.accept(2) == ([], False)
        near = [kind().connect(listener.address, DEADLINE_S) for _ in range(3)]
        far = accepted(listener, 1)
        for count in (0, 1):
            more, no_room = listener.accept(count)
            assert (len(more), no_room) == (count, False)
            far += more
        far += accepted(listener, 1)
        assert listener.accept(2) == ([], False)
        for one, other, byte in zip(near, far, (b"a", b"b", b"c")):
            assert carried(one, other, byte) == byte
        for link in near + far:
            link.close()


def test_where_nobody_listens_is_an_error_in_time(kind: Kind) -> None:
    with listening(kind) as listener:
        pass
    listener.close()  # once more
    begun_s = time.monotonic()
    with pytest.raises(OSError):
        kind().connect(listener.address, 2.0)
    assert time.monotonic() - begun_s < DEADLINE_S


def test_a_host_that_does_not_answer_is_an_error_in_time() -> None:
    with socket.create_server((HOST, 0), backlog=0) as full:
        waiting = []
        with pytest.raises(OSError):
            while len(waiting) < 5:
                begun_s = time.monotonic()
                waiting.append(Tcp().connect(full.getsockname(), 0.2))
        assert 0.1 < time.monotonic() - begun_s < DEADLINE_S
        for link in waiting:
            link.close()


def test_a_listener_says_that_there_is_no_room_and_accepts_later(
    ready_kind: Kind,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening(ready_kind) as listener:
        near = ready_kind().connect(listener.address, DEADLINE_S)
        assert is_ready(listener.descriptor, select.EPOLLIN, DEADLINE_S)
        free = os.dup(listener.descriptor)
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            assert listener.accept(5) == ([], True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        (far,) = accepted(listener, 1)
        near.close()
        far.close()


def test_descriptors_say_when_there_is_something_to_do(ready_kind: Kind) -> None:
    with listening(ready_kind) as listener:
        assert not is_ready(listener.descriptor, select.EPOLLIN)
        near = ready_kind().connect(listener.address, DEADLINE_S)
        assert is_ready(listener.descriptor, select.EPOLLIN, DEADLINE_S)
        (far,) = accepted(listener, 1)
        assert not is_ready(listener.descriptor, select.EPOLLIN)
    shake_hands(near, far)
    assert is_ready(far.descriptor, select.EPOLLOUT)
    assert not is_ready(far.descriptor, select.EPOLLIN)
    near.hold_at_most(8192)
    taken = fill(near)
    assert is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
    assert not is_ready(near.descriptor, select.EPOLLOUT)
    while taken:
        taken -= len(received(far))
    assert not heard_now(far)  # perhaps of a record that has not come completely
    assert is_ready(near.descriptor, select.EPOLLOUT, DEADLINE_S)
    assert not is_ready(far.descriptor, select.EPOLLIN)
    near.close()
    assert is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
    far.close()


def test_tcp_wakes_nobody_before_enough_bytes_have_come_or_the_link_has_ended() -> None:
    """Those that came before are there all the same."""
    with linked(Tcp) as (near, far):
        far.wake_at(10_000)
        near.send([memoryview(bytes(9_999))])
        assert not is_ready(far.descriptor, select.EPOLLIN, 0.1)
        near.send([memoryview(b"!")])
        assert is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
        assert len(received(far)) == 10_000
        near.send([memoryview(b"?")])
        assert not is_ready(far.descriptor, select.EPOLLIN, 0.1)
        assert received(far) == b"?"
        near.send([memoryview(b".")])
        near.close()
        assert is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
        assert received(far) == b"."
        assert received(far) == b""


def test_wishes_for_bytes_keep_nobody_from_those_that_have_come(ready_kind: Kind) -> None:
    with linked(ready_kind) as (near, far):
        far.wake_at(4_000)
        near.send([memoryview(bytes(4_000))])
        left = 4_000
        while left:
            assert far.holds_more or is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
            left -= len(heard_now(far, 3_000))
            if left > 0:
                far.wake_at(left)


def test_of_bytes_that_are_left_the_descriptor_tells_or_the_link(ready_kind: Kind) -> None:
    with linked(ready_kind) as (near, far):
        left = near.send([memoryview(bytes(40_000))])
        assert left == 40_000
        while left:
            assert far.holds_more or is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
            left -= len(heard_now(far, 700))
        assert not heard_now(far)
        assert not far.holds_more


# Whole jobs with a transport of a user's own.

PLUGIN = {"P3KV_PLUGINS": "own_transport"}
OWN = {**PLUGIN, "P3KV_TRANSPORT": "unix"}


def test_a_job_trains_right_by_a_transport_of_the_user_s_own_and_not_by_tcp(tmp_path: Path) -> None:
    result = run_job(
        "connected.py",
        [tmp_path, "sgd-servers"],
        workers=2,
        servers=2,
        P3KV_SLICE_SIZE=exact_model.SLICE_SIZE,
        **OWN,
    )
    assert result.code == 0, result.output
    exact_model.assert_trained_as_by_one_process(exact_model.saved(tmp_path, "sgd-servers"), "sgd")
    told = [line.split() for line in result.said_by("worker 0").splitlines() if " has " in line]
    roles = sorted(role for role, _, *peers in told if peers == ["scheduler"])
    assert roles == ["server", "server", "worker", "worker"], told


def test_a_worker_follows_each_server_s_own_transport() -> None:
    """It measures the network, so bytes go by both."""
    ended = joined(("server 0", {}), ("server 1", OWN), ("worker 0", PLUGIN))
    assert {result.code for result in ended.values()} == {0}, ended
    assert ended["worker 0"].output == "worker 0 of 1 has joined\n"


def test_a_worker_that_does_not_know_a_server_s_transport_ends_the_job_and_is_named() -> None:
    ended = joined(("server 0", OWN), ("worker 0", PLUGIN), ("worker 1", {}))
    for name, result in ended.items():
        assert result.code == 1 and "Traceback" not in result.output, result.output
        for words in ("worker 1: there is no transport 'unix', only tcp", "P3KV_PLUGINS"):
            assert words in result.output, f"{name}: {result.output}"
