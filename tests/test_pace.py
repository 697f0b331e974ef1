"""Connections kept in step: real sockets whose peers read at different rates."""

from __future__ import annotations

import socket
import statistics
from contextlib import suppress
from typing import Iterator, List, NoReturn

import pytest

from experiments.campaign.measure import measure
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing.by_spare_hosts import busiest_link
from experiments.models import load
from p3kv.forecast import bound
from p3kv.transport import SocketLink
from p3kv.wire.connection import Connection
from p3kv.wire.header import Kind, pack_header
from p3kv.wire.loop import Loop
from p3kv.wire.protocol import FROM_SERVERS, Conversation

CREDIT_BYTES = 64 * 1024
LOOK_S = 0.002
DEADLINE_S = 10.0


class Peer:
    """A connection with frames, and a peer that reads `bytes_s` bytes of them a second."""

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
            SocketLink(near), Conversation(FROM_SERVERS, "server"), _unused, _unused, credit_bytes
        )
        loop.add_connection(self.connection)
        self.queue(frames)
        self._read()

    def queue(self, frames: int) -> None:
        payload = memoryview(bytes(CREDIT_BYTES))
        for _ in range(frames):
            header = pack_header(Kind.PUSH, 0, payload_bytes=len(payload))
            self.connection.writer.push(0, header, payload)

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


def run(loop: Loop, seconds: float, peers: List[Peer]) -> None:
    loop.call_later(seconds, loop.stop)
    loop.run()
    for peer in peers:
        peer.close()


def test_none_gets_ahead_of_another_by_more_than_its_credit_allows(loop: Loop) -> None:
    peers = [Peer(loop, 8e6), Peer(loop, 2e6, credits=2), Peer(loop, 8e6)]
    loop.pace.keeps = True
    run(loop, 1.0, peers)
    quick, slow, other = (peer.credits for peer in peers)
    assert slow > 10
    # The last write may go beyond: the kernel takes up to twice the credit at once.
    assert slow <= quick <= slow + 5
    assert slow <= other <= slow + 5


def test_out_of_step_each_sends_what_its_peer_takes(loop: Loop) -> None:
    peers = [Peer(loop, 8e6), Peer(loop, 2e6, credits=2)]
    loop.pace.keeps = True
    loop.pace.keeps = False
    run(loop, 1.0, peers)
    quick, slow = (peer.credits for peer in peers)
    assert quick > 3 * slow


def test_one_that_had_nothing_to_send_is_not_waited_for_while_it_catches_up(loop: Loop) -> None:
    late = Peer(loop, 4e6, frames=0)
    peers = [Peer(loop, 4e6), late]
    loop.pace.keeps = True
    before: List[float] = []

    def begin() -> None:
        before.extend(peer.credits for peer in peers)
        late.queue(400)

    loop.call_later(0.5, begin)
    run(loop, 1.0, peers)
    gained = [peer.credits - credits for peer, credits in zip(peers, before)]
    assert before[0] > 10 and before[1] == 0
    assert min(gained) > 10
    assert abs(gained[0] - gained[1]) < 5


def test_one_that_is_stuck_holds_up_the_others_for_a_second_only(loop: Loop) -> None:
    stuck = Peer(loop, 0)
    peers = [Peer(loop, 4e6), stuck]
    loop.pace.keeps = True
    held: List[float] = []
    loop.call_later(0.8, lambda: held.append(peers[0].credits))
    run(loop, 2.0, peers)
    assert held[0] < stuck.credits + 5
    assert peers[0].credits > held[0] + 10


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


def _unused(*_: object) -> NoReturn:
    raise AssertionError("nothing comes, and nobody is lost")
