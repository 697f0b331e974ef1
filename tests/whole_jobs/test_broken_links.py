"""Links that end anywhere: whatever is lost with them comes again, once and in order."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from random import Random
from typing import Dict, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.consistency import BulkSynchronous
from p3kv.errors import ProtocolError
from p3kv.wire.fields import Header, PushHeader
from p3kv.wire.framing import Frame, FrameReader, FrameWriter
from p3kv.wire.header import HEADER_BYTES, Kind
from p3kv.wire.scheduler_socket import Session
from tests.consistency.test_schedules import RULES, SELDOM, STEPS, Moods, Script, Training, values
from tests.handling import Told

WELCOME = b"welcome"


class Far:
    """The end that receives, and what it has."""

    def __init__(self) -> None:
        self.keys: List[int] = []
        self.payloads: List[bytes] = []
        self.received = 0
        self.reader = FrameReader()
        self._begun: Optional[Tuple[Header, bytearray]] = None

    def receive(self, data: bytes) -> None:
        self.received += len(data)
        rest = memoryview(data)
        while rest:
            rest = rest[self.reader.feed(rest) :]
            while not self.reader.missing:
                if self._begun is not None:
                    self.keys.append(self._begun[0].key)
                    self.payloads.append(bytes(self._begun[1]))
                    self._begun = None
                header = self.reader.next_header()
                if header is None:
                    break
                self._begun = header, bytearray(header.payload_bytes)
                self.reader.land(memoryview(self._begun[1]))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=20),
    st.integers(0, 2**32),
    st.floats(0.0, 0.6),
    st.booleans(),
)
def test_frames_arrive_once_and_in_order_whatever_links_lose(
    sizes: List[int], seed: int, breaks: float, made_late: bool
) -> None:
    random, writer, far = Random(seed), FrameWriter(), Far()
    sent: List[int] = []
    arrived: List[int] = []
    payloads = [random.randbytes(size) for size in sizes]
    for number, payload in enumerate(payloads):
        header = PushHeader(Kind.PUSH, 0, key=number)
        memory = memoryview(payload)
        writer.push(Told(
            0, header, memory, make=(lambda memory=memory: memory) if made_late else None,
            sent=partial(sent.append, number), arrived=partial(arrived.append, number),
        ))  # fmt: skip
    on_way = b""
    preamble = 0
    while writer or on_way:
        assert len(writer.buffers()) <= 1024, "the system sends no more at once"
        data = b"".join(writer.buffers())
        count = random.choice([len(data), random.randrange(len(data) + 1)])
        writer.sent(count)
        on_way += data[:count]
        count = random.randrange(len(on_way) + 1)
        skipped = min(preamble, count)
        preamble -= skipped
        far.receive(on_way[skipped:count])
        on_way = on_way[count:]
        if random.random() < breaks:
            writer.resume(far.received, WELCOME)
            on_way, preamble = b"", len(WELCOME)
        elif random.random() < 0.3:
            writer.arrived(far.received)
        assert set(arrived) <= set(far.keys)
    writer.arrived(far.received)
    assert far.keys == sent == arrived == list(range(len(sizes)))
    assert far.payloads == payloads


def test_a_peer_can_t_have_received_more_than_was_sent_or_less_than_before() -> None:
    writer = FrameWriter()
    for number in range(2):
        writer.push(Frame(0, PushHeader(Kind.PUSH, 0, key=number)))
    writer.sent(sum(map(len, writer.buffers())))
    writer.arrived(HEADER_BYTES)
    for received in (0, HEADER_BYTES - 1, 2 * HEADER_BYTES + 1):
        with pytest.raises(ProtocolError):
            writer.resume(received)
    writer.resume(2 * HEADER_BYTES)
    assert not writer


def test_a_thousand_frames_that_come_again_are_not_too_many_for_one_write() -> None:
    writer = FrameWriter()
    for number in range(2000):
        writer.push(Frame(0, PushHeader(Kind.PUSH, 0, key=number), memoryview(b"x")))
    while writer:
        writer.sent(sum(map(len, writer.buffers())))
    writer.resume(0)
    far = Far()
    while writer:
        data = b"".join(writer.buffers())
        assert len(writer.buffers()) <= 1024
        far.receive(data)
        writer.sent(len(data))
    assert far.keys == list(range(2000))


@given(st.lists(st.sampled_from("sabxyt"), max_size=60))
def test_a_session_loses_no_message_and_brings_none_twice(events: List[str]) -> None:
    ends = {"a": Session(), "b": Session()}
    other = {"a": "b", "b": "a"}
    on_way: Dict[str, List[List[bytes]]] = {"a": [], "b": []}
    said: Dict[str, List[bytes]] = {"a": [], "b": []}
    heard: Dict[str, List[bytes]] = {"a": [], "b": []}

    def hear(end: str) -> None:
        data, numbers = on_way[other[end]].pop(0)
        ends[end].take(numbers)
        heard[end].append(data)

    def resume() -> None:
        for end in ends:
            on_way[end] = ends[end].again(ends[other[end]].received)

    for event in events:
        if event in "ab":
            data = b"%d" % len(said[event])
            said[event].append(data)
            on_way[event].append(ends[event].keep(data))
        elif event in "xy":
            end = {"x": "a", "y": "b"}[event]
            if on_way[other[end]]:
                hear(end)
        else:
            resume()
    resume()
    for end in ends:
        while on_way[other[end]]:
            hear(end)
        assert heard[end] == said[other[end]]
    for end in ends:
        ends[end].again(ends[other[end]].received)
        assert ends[end].all_arrived
        with pytest.raises(ProtocolError):
            ends[end].again(len(said[end]) + 1)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans())
def test_results_are_right_whatever_links_end(
    rule: type, seed: int, workers: int, servers: int, clips: bool, neighbours: bool
) -> None:
    per_host = 2 if neighbours and rule is BulkSynchronous else 1
    random = Random(seed)
    expected = values(workers, STEPS)
    with closing(Training(workers, servers, rule, per_host=per_host)) as job:
        scripts = [
            Script(job, worker, rank, random, rule(workers))
            for rank, worker in enumerate(job.workers)
        ]
        for script in scripts:
            script.train(expected, clips)
        moods, left = Moods(random), 40
        while True:
            events = list(job.events())
            attempts = [a for one in job.workers for a in one.reconnecting._attempts.values()]
            mended = [attempt.connection for attempt in attempts]
            broken = [
                (worker, server)
                for worker in job.workers
                for server, connection in worker.servers.items()
                if connection.ended and connection not in mended
            ]
            if left and random.random() < 0.05:
                left -= 1
                _break_one(job, random)
            elif broken and (not events or random.random() < 0.2):
                job.mend_link(*random.choice(broken))
            elif events:
                function, *arguments = moods.choice(events)
                function(*arguments)
            else:
                break
            job.follow_links()
        assert left < 40
        for worker in job.workers:
            assert worker.under_way == 0
            assert not worker.failures
        for name, rounds in (("often", STEPS), ("seldom", STEPS // SELDOM)):
            np.testing.assert_array_equal(job.kept(job.keys[name][0]), expected[rounds])
        for script in scripts:
            for check in script.checks:
                check()
        for server in job.servers:
            assert server.most_open() == 0
            assert server.failures == []


def _break_one(job: Training, random: Random) -> None:
    living = [
        connection
        for connection in job._connections.values()
        if not connection.ended and not connection.closed
    ]
    neighbours = [c for one in job.workers for c in one.neighbours.values()]
    living = [one for one in living if one not in neighbours]  # no network is between those
    connection: Optional[object] = random.choice(living) if living else None
    if connection is None:
        return
    of_workers = [c for one in job.workers for c in one.servers.values()]
    if any(connection is one for one in of_workers) and random.random() < 0.5:
        job.half_break_link(connection)
    else:
        job.break_link(connection)


def test_a_worker_that_pushes_and_wants_no_result_waits_until_its_push_has_arrived() -> None:
    with closing(Training(1, 1)) as job:
        worker, key = job.workers[0], job.keys["often"][0]
        worker.call(key, 0, np.ones(12_000, np.float32), None)
        worker.begin()
        connection = worker.servers[0]
        while connection.writer:
            connection.send()
        assert worker.under_way == 1
        job.break_link(connection)
        job.mend_link(worker, 0)
        job.follow_links()
        while events := list(job.events()):
            events[0][0](*events[0][1:])
            job.follow_links()
        assert worker.under_way == 0
        np.testing.assert_array_equal(job.kept(key), np.ones(12_000, np.float32))
