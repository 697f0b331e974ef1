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
from typing import Dict, Iterator, List, Tuple, Type

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p3kv.transport import MAX_ADDRESS, Link, Listener, Tcp, Transport
from tests.in_memory import Memory
from tests.jobs import ROOT, SCRIPTS, SUMS_ONLY, JobResult, held_port, results, run_job, start_role

sys.path.insert(0, str(SCRIPTS))
import exact_model
from own_transport import UnixSockets

DEADLINE_S = 10.0
HOST = "127.0.0.1"
READY: Tuple[Type[Transport], ...] = (Tcp, UnixSockets)
"""Transports that say by their descriptors when they are ready. In memory nothing wakes anybody:
there the test says when bytes go, and accepting takes no descriptor."""


@pytest.fixture(params=[Tcp, UnixSockets, Memory], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Type[Transport]:
    made: Type[Transport] = request.param
    return made


@pytest.fixture(params=READY, ids=lambda kind: kind.__name__)
def ready_kind(request: pytest.FixtureRequest) -> Type[Transport]:
    made: Type[Transport] = request.param
    return made


@contextmanager
def listening(kind: Type[Transport]) -> Iterator[Listener]:
    listener = kind().listen(HOST)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def linked(kind: Type[Transport]) -> Iterator[Tuple[Link, Link]]:
    """Both ends of a link."""
    with listening(kind) as listener:
        near = kind().connect(listener.address, DEADLINE_S)
        (far,) = accepted(listener, 1)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


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


def fill(link: Link) -> int:
    """Sends until the link is full; returns how many bytes it has taken."""
    piece, taken = memoryview(bytes(4096)), 0
    with suppress(BlockingIOError):
        while True:
            taken += link.send([piece])
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
    kind: Type[Transport], sent: List[int], into: List[int], held_bytes: int, back: bool
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


def test_a_link_without_bytes_or_without_room_says_so_and_goes_on(kind: Type[Transport]) -> None:
    with linked(kind) as (near, far):
        with pytest.raises(BlockingIOError):
            near.receive_into([memoryview(bytearray(1))])
        far.hold_at_most(8192)
        taken = fill(far)
        assert taken > 0
        with pytest.raises(BlockingIOError):
            far.send([memoryview(b"more")])
        while taken:
            taken -= len(received(near))
        assert far.send([memoryview(b"more")]) == 4
        assert received(near) == b"more"


def test_the_peer_s_end_comes_after_its_bytes(kind: Type[Transport]) -> None:
    with linked(kind) as (near, far):
        assert far.send([memoryview(b"last "), memoryview(b"words")]) in (5, 10)
        far.close()
        said = b""
        while more := received(near, 3):
            said += more
        assert said in (b"last ", b"last words")
        assert received(near) == b""


def test_sending_to_a_peer_that_has_gone_is_an_error(kind: Type[Transport]) -> None:
    with linked(kind) as (near, far):
        fill(near)
        far.close()  # with bytes that it has not received
        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(OSError) as told:
            while time.monotonic() < deadline:
                with suppress(BlockingIOError):
                    near.send([memoryview(b"anybody?")])
        assert not isinstance(told.value, BlockingIOError)


def test_a_link_takes_few_bytes_that_it_can_not_send(kind: Type[Transport]) -> None:
    """With a small limit fewer than with a large one, and no more than twice the limit and a page:
    Linux doubles what it is told, for its own notes."""
    taken = {}
    for limit_bytes in (16_384, 262_144):
        with linked(kind) as (near, far):
            near.hold_at_most(limit_bytes)
            taken[limit_bytes] = fill(near)
            at_peer = 0 if kind is not Tcp else len(received(far, 1 << 24))
            assert taken[limit_bytes] - at_peer <= 2 * limit_bytes + 4096
    assert taken[16_384] < taken[262_144]


def test_a_link_may_be_closed_twice_and_does_nothing_afterwards(kind: Type[Transport]) -> None:
    with linked(kind) as (near, far):
        for _ in range(2):
            near.close()
            near.hold_at_most(10_000)
        assert received(far) == b""
        with pytest.raises(OSError):
            near.send([memoryview(b"more")])
        with pytest.raises(OSError):
            near.receive_into([memoryview(bytearray(1))])


def test_a_listener_has_an_address_of_its_own_on_the_host(kind: Type[Transport]) -> None:
    with listening(kind) as one, listening(kind) as other:
        assert one.address != other.address
        for host, number in (one.address, other.address):
            assert host == HOST and 0 <= number <= MAX_ADDRESS


def test_a_listener_accepts_as_many_as_it_is_asked_for(kind: Type[Transport]) -> None:
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
        for number, link in enumerate(near):
            link.send([memoryview(bytes([number]))])
        assert [received(link) for link in far] == [bytes([number]) for number in range(3)]
        for link in near + far:
            link.close()


def test_where_nobody_listens_is_an_error_in_time(kind: Type[Transport]) -> None:
    with listening(kind) as listener:
        pass
    listener.close()  # once more
    begun_s = time.monotonic()
    with pytest.raises(OSError):
        kind().connect(listener.address, 2.0)
    assert time.monotonic() - begun_s < 4.0


def test_a_host_that_does_not_answer_is_an_error_in_time() -> None:
    with socket.create_server((HOST, 0), backlog=0) as full:
        waiting = []
        with pytest.raises(OSError):
            while len(waiting) < 5:
                begun_s = time.monotonic()
                waiting.append(Tcp().connect(full.getsockname(), 0.2))
        assert 0.1 < time.monotonic() - begun_s < 5.0
        for link in waiting:
            link.close()


def test_a_listener_says_that_there_is_no_room_and_accepts_later(
    ready_kind: Type[Transport],
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


def test_descriptors_say_when_there_is_something_to_do(ready_kind: Type[Transport]) -> None:
    with listening(ready_kind) as listener:
        assert not is_ready(listener.descriptor, select.EPOLLIN)
        near = ready_kind().connect(listener.address, DEADLINE_S)
        assert is_ready(listener.descriptor, select.EPOLLIN, DEADLINE_S)
        (far,) = accepted(listener, 1)
        assert not is_ready(listener.descriptor, select.EPOLLIN)
    assert is_ready(far.descriptor, select.EPOLLOUT)
    assert not is_ready(far.descriptor, select.EPOLLIN)
    near.hold_at_most(8192)
    taken = fill(near)
    assert is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
    assert not is_ready(near.descriptor, select.EPOLLOUT)
    while taken:
        taken -= len(received(far))
    assert is_ready(near.descriptor, select.EPOLLOUT, DEADLINE_S)
    assert not is_ready(far.descriptor, select.EPOLLIN)
    near.close()
    assert is_ready(far.descriptor, select.EPOLLIN, DEADLINE_S)
    far.close()


# Whole jobs with a transport of a user's own.

PLUGIN = {"P3KV_PLUGINS": "own_transport", "PYTHONPATH": f"{ROOT}:{SCRIPTS}"}
OWN = {**PLUGIN, "P3KV_TRANSPORT": "unix"}
JOIN = [sys.executable, str(SCRIPTS / "join.py")]


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


def joined(*plan: Tuple[str, Dict[str, str]]) -> Dict[str, JobResult]:
    """How the processes of a job end, each of which has settings of its own."""
    count = {role: sum(name.startswith(role) for name, _ in plan) for role in ("worker", "server")}
    with held_port() as holder:
        port, since = holder.getsockname()[1], time.monotonic()
        started = {"scheduler": start_role("scheduler", JOIN, port, *count.values())}
        for name, changes in plan:
            role, _, rank = name.partition(" ")
            place = {f"DMLC_{role.upper()}_ID": rank, **SUMS_ONLY}
            started[name] = start_role(role, JOIN, port, *count.values(), **place, **changes)
        return results(started, since, 60.0)


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
