"""Connections kept in step: real sockets whose peers read at different rates."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import ExitStack, closing, suppress
from typing import Callable, Iterator

import pytest

from experiments.campaign.measure import measure
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing.by_spare_hosts import busiest_link
from experiments.models import load
from p3kv.report.forecast import bound
from p3kv.transport import SocketLink
from p3kv.wire.connection import Connection
from p3kv.wire.fields import PushHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import Kind
from p3kv.wire.loop import Loop
from p3kv.wire.protocol import FROM_SERVERS, Conversation
from tests.handling import Nobody
from tests.jobs import DEADLINE_S

CREDIT_BYTES = 64 * 1024
LOOK_S = 0.002


class Peer:
    """A connection with frames, and a peer that reads `bytes_s` bytes of them in a second of the
    loop's timers: where the loop is late, all peers are."""

    def __init__(self, loop: Loop, bytes_s: float, credits: int = 1, frames: int = 400) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # The receiver's memory is part of the way: only a small one is soon full.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            near = socket.create_connection(listener.getsockname())
            self._far = listener.accept()[0]
        self._far.setblocking(False)
        self._loop = loop
        self._bytes_s = bytes_s
        credit_bytes = credits * CREDIT_BYTES
        self.connection = Connection(
            SocketLink(near), Conversation(FROM_SERVERS, "server"), Nobody(), credit_bytes
        )
        loop.add_connection(self.connection)
        self.queue(frames)
        self._read()

    def queue(self, frames: int) -> None:
        payload = memoryview(bytes(CREDIT_BYTES))
        for _ in range(frames):
            self.connection.writer.push(Frame(0, PushHeader(Kind.PUSH, 0), payload))

    @property
    def credits(self) -> float:
        """How many of its credits the connection has sent."""
        return self.connection.sent_bytes / self.connection.credit_bytes

    def close(self) -> None:
        self._far.close()

    def _read(self) -> None:
        if self._bytes_s:
            with suppress(BlockingIOError):
                self._far.recv(int(self._bytes_s * LOOK_S))
        self._loop.call_later(LOOK_S, self._read)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


MakePeer = Callable[..., Peer]


@pytest.fixture
def peers(loop: Loop) -> Iterator[MakePeer]:
    """Makes peers of the loop, and closes them."""
    with ExitStack() as stack:

        def make(bytes_s: float, **more: int) -> Peer:
            return stack.enter_context(closing(Peer(loop, bytes_s, **more)))

        yield make


def run_until(loop: Loop, condition: Callable[[], bool]) -> None:
    """Runs the loop until `condition()` is true; fails when that takes too long."""
    deadline = time.monotonic() + DEADLINE_S

    def look() -> None:
        if condition() or time.monotonic() > deadline:
            loop.stop()
        else:
            loop.call_later(LOOK_S, look)

    look()
    loop.run()
    assert condition(), "it did not happen in time"


def test_none_gets_ahead_of_another_by_more_than_its_credit_allows(
    loop: Loop, peers: MakePeer
) -> None:
    quick, slow, other = peers(8e6), peers(2e6, credits=2), peers(8e6)
    loop.pacing.keeps = True
    run_until(loop, lambda: slow.credits > 10)
    # The last write may go beyond: the kernel takes up to twice the credit at once.
    assert slow.credits <= quick.credits <= slow.credits + 5
    assert slow.credits <= other.credits <= slow.credits + 5


def test_out_of_step_each_sends_what_its_peer_takes(loop: Loop, peers: MakePeer) -> None:
    quick, slow = peers(8e6), peers(2e6, credits=2)
    loop.pacing.keeps = True
    loop.pacing.keeps = False
    run_until(loop, lambda: slow.credits > 5)
    assert quick.credits > 3 * slow.credits


def test_one_that_had_nothing_to_send_is_not_waited_for_while_it_catches_up(
    loop: Loop, peers: MakePeer
) -> None:
    early, late = peers(4e6), peers(4e6, frames=0)
    loop.pacing.keeps = True
    run_until(loop, lambda: early.credits > 10)
    assert late.credits == 0
    before = early.credits
    late.queue(400)
    run_until(loop, lambda: min(early.credits - before, late.credits) > 10)
    assert abs(early.credits - before - late.credits) < 5


def test_one_that_is_stuck_holds_up_the_others_for_a_second_only(
    loop: Loop, peers: MakePeer
) -> None:
    living, stuck = peers(4e6), peers(0)
    loop.pacing.keeps = True
    start = time.monotonic()
    run_until(loop, lambda: living.credits > stuck.credits + 5)
    assert time.monotonic() - start > 0.95
    held = living.credits
    run_until(loop, lambda: living.credits > held + 10)


@pytest.mark.alone
@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_a_server_on_a_host_of_its_own_is_sent_what_it_keeps_all_the_time() -> None:
    model, dilation, workers, rate_bit_s = "equal_layers", 0.2, 4, 125e6
    with Cluster(workers + 1, rate_bit_s / 1e6) as cluster:
        run = measure(cluster, "p3kv", model, dilation, 10, 6, 120.0, workers=workers)
    of, carried = load(model), busiest_link([1] * workers + [0], [1.0] * (workers + 1))
    least_s = bound.lower_bound_s(
        [carried * size for size in of.layer_bytes],
        [dilation * seconds for seconds in of.forward_s],
        [dilation * seconds for seconds in of.backward_s],
        2,
        rate_bit_s,
    )
    assert least_s < statistics.median(run.iteration_s) < 1.15 * least_s
