"""A worker that waits for values tells of a server that says nothing, and waits not for ever."""

from __future__ import annotations

from contextlib import closing
from typing import Iterator

import numpy as np
import pytest

from p3kv.config import Settings
from p3kv.wire.fields import UpdatedHeader
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.worker.stalls import Silences
from tests.in_memory import MemoryJob

SIZE, SLICE_SIZE = 250, 100


class Waiting:
    """Worker 1 of two, which has pushed a round for which worker 0 has not pushed."""

    def __init__(self, job: MemoryJob) -> None:
        self.job = job
        [key, *_] = keys = job.declare("w", SIZE)
        self.arrays = [np.ones(SIZE, np.float32) for _ in keys]
        job.workers[0].call(key, INITIAL_ROUND, self.arrays[0], None)
        job.finish()
        job.workers[1].call(keys[1], 1, self.arrays[1], self.arrays[1])
        job.finish()
        self.keys = keys
        self.data_plane = job.workers[1].data_plane
        self.silences = Silences(
            Settings(stall_timeout_s=100.0),
            self.data_plane.servers,
            self.data_plane.exchange,
        )

    def look(self, begin_s: int, end_s: int) -> None:
        """Looks as often as a worker does, up to `end_s`."""
        for now_s in range(begin_s, end_s + 1):
            self.silences.look(float(now_s))


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    with closing(MemoryJob(2, 2, SLICE_SIZE)) as job:
        yield Waiting(job)


def test_all_silent_servers_are_told_and_again_when_the_wait_has_doubled(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    counts = []
    for now_s in range(100, 136, 5):
        waiting.look(now_s - 4, now_s)
        counts.append(len(caplog.messages))
    assert counts == [0, 0, 2, 2, 4, 4, 4, 4]
    assert caplog.messages[0].startswith(
        "server 0: nothing has moved on its connection for 10 s, and key 'w' in round 1 is still "
        "to come."
    )
    assert caplog.messages[1].startswith("server 1: ")


def test_a_server_that_says_what_it_waits_for_is_not_silent(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    for now_s in range(100, 199):
        if now_s in (110, 120, 140, 180):  # as a server's own words come
            for connection in waiting.data_plane.servers.values():
                connection.sent_bytes += 100
        waiting.silences.look(float(now_s))
    assert caplog.messages == []


def test_nobody_is_told_of_once_the_values_are_there(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    waiting.look(100, 105)
    waiting.job.workers[0].call(waiting.keys[0], 1, waiting.arrays[0], waiting.arrays[0])
    waiting.job.finish()
    waiting.look(106, 250)
    assert caplog.messages == []


def test_only_servers_that_owe_something_are_told_of(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    job = waiting.job
    job.workers[0].call(waiting.keys[0], 1, waiting.arrays[0], waiting.arrays[0])
    job.workers[0].begin()
    job.carry_all(job.workers[0].servers[1])
    server = job.servers[1]
    while len(server.consumer.queue):
        server.consumer.consume()
    job.carry_all(server.workers.connections[1])
    waiting.look(100, 111)
    assert [message.partition(":")[0] for message in caplog.messages] == ["server 0"]


def test_servers_whose_last_slices_have_begun_to_arrive_and_stop_are_told_of(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    key = waiting.keys[1]
    for piece in key.slices(SLICE_SIZE):
        frame = UpdatedHeader(
            Kind.UPDATED, piece.server, payload_bytes=4 * piece.length, key=key.key_id,
            slice=piece.index, round=1, step=1,
        )  # fmt: skip
        waiting.data_plane.slices.land(waiting.data_plane.servers[piece.server], frame)
    waiting.look(100, 111)
    assert [message[:9] for message in caplog.messages] == ["server 0:", "server 1:"]


def test_a_worker_s_own_pause_is_not_a_server_s_silence(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    waiting.look(100, 105)
    waiting.look(300, 309)
    assert caplog.messages == []
    waiting.look(310, 310)
    assert len(caplog.messages) == 2


def test_after_the_timeout_the_connection_counts_as_lost(waiting: Waiting) -> None:
    lost = []
    waiting.data_plane.lost = lambda connection, reason: lost.append((connection.peer, reason))
    waiting.look(100, 199)
    assert lost == []
    waiting.look(200, 200)
    reason = (
        "nothing has moved on its connection for 100 s, and key 'w' in round 1 is still to come"
    )
    assert lost == [(rank, f"{reason} (P3KV_STALL_TIMEOUT_S)") for rank in (0, 1)]
    assert all(connection.ended for connection in waiting.data_plane.servers.values())


def test_a_server_may_be_silent_until_the_script_goes_on_with_the_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where workers train by themselves, but not in a store of sums beside that."""
    with closing(MemoryJob(2, 2, SLICE_SIZE, "local:steps=5")) as job:
        waiting = Waiting(job)
        key = waiting.keys[1]
        key.goes_on = True
        waiting.look(100, 300)
        assert caplog.messages == []
        key.round = 1  # as the front end counts it
        key.value_is_due()
        waiting.look(301, 312)
        assert [message[:9] for message in caplog.messages] == ["server 0:", "server 1:"]
    caplog.clear()
    with closing(MemoryJob(2, 2, SLICE_SIZE, "local:steps=5")) as job:
        Waiting(job).look(100, 112)
        assert len(caplog.messages) == 2
