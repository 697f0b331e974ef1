"""The size of slices follows the network while a job trains, and changes no number."""

from __future__ import annotations

import re
import subprocess
from contextlib import closing
from types import SimpleNamespace
from typing import Dict, List, Optional, Tuple, cast

import numpy as np
import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.config import Settings
from p3kv.consistency import BulkSynchronous
from p3kv.slicing import LEAST_CREDIT_BYTES, gradient_credit_bytes
from p3kv.wire.connection import Connection
from p3kv.wire.control import ControlClient
from p3kv.wire.framing import FrameWriter
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.loop import Drain, Loop, Pacing
from p3kv.wire.messages import DeclaredKey, Measured, SliceSizes
from p3kv.wire.slice_sizes import SliceSizesByRound
from p3kv.worker.egress import Egress
from p3kv.worker.step_times import Parts, StepTimes
from p3kv.worker.transfers import WorkerKey
from p3kv.worker.tuning import Tuning
from tests.in_memory import MemoryJob
from tests.jobs import DEADLINE_S, run_job, start_on

MB = 1_000_000
WINDOW = 3
CALM_ROUNDS = 4
"""How many rounds are made before the network changes."""


class Held:
    """A connection that notes its credit."""

    def __init__(self) -> None:
        self.writer = FrameWriter()
        self.credit_bytes = 0

    def hold_at_most(self, size_bytes: int) -> None:
        self.credit_bytes = size_bytes


def _egress(servers: Dict[int, Connection]) -> Egress:
    return Egress(0, servers, [], cast(Loop, SimpleNamespace(pacing=Pacing())))


class Tuned:
    """A worker's tuning without servers, and what it says."""

    def __init__(
        self, servers: int = 0, first_elems: Optional[int] = 100_000, **settings: int
    ) -> None:
        self.drain = Drain()
        self.sizes = SliceSizesByRound()
        self.times = StepTimes()
        self.measured: List[Measured] = []
        self.held = {server: Held() for server in range(servers)}
        held = cast(Dict[int, Connection], self.held)
        self.egress = _egress(held)
        self.tuning = Tuning(
            0, held, self.sizes, Settings(**settings), WINDOW, self.drain, self.times,
            self.egress, cast(ControlClient, SimpleNamespace(send=self.measured.append)),
        )  # fmt: skip
        if first_elems is not None:
            self.tuning.announce(INITIAL_ROUND, SliceSizes(first_elems))
        self.step = 0

    @property
    def credits_bytes(self) -> List[int]:
        return [connection.credit_bytes for connection in self.held.values()]

    @property
    def reports(self) -> List[float]:
        return [measured.rate_bytes_s for measured in self.measured]

    def rounds(
        self, count: int, rate_bytes_s: float, seconds: float = 0.5, waiting: float = 0.0
    ) -> None:
        for _ in range(count):
            self.times.step_s += 1.0
            self.times.parts = self.times.parts.plus(Parts(network_s=waiting))
            self.drain.bytes += int(rate_bytes_s * seconds)
            self.drain.seconds += seconds
            self.next_step()

    def next_step(self) -> None:
        self.step += 1
        self.tuning.begin_step(self.step)

    def size(self, round: int) -> int:
        return self.sizes.of(self.sizes.generation(round)).slice_size


def test_a_rate_is_told_when_most_of_some_rounds_have_it_and_again_when_it_changes() -> None:
    tuned = Tuned()
    tuned.rounds(4, 10 * MB)
    assert tuned.reports == []
    tuned.rounds(10, 10 * MB)
    tuned.rounds(5, 12 * MB)
    assert tuned.reports == pytest.approx([10 * MB])
    tuned.rounds(2, 300 * MB)
    tuned.rounds(3, 10 * MB)
    assert len(tuned.reports) == 1  # a disturbance
    tuned.rounds(5, 300 * MB)
    assert tuned.reports == pytest.approx([10 * MB, 300 * MB])


def test_rounds_that_do_not_wait_for_the_network_say_nothing_of_it() -> None:
    tuned = Tuned()
    tuned.rounds(10, 10 * MB, seconds=0.001)
    tuned.rounds(10, 0.1 * MB)
    assert tuned.reports == []


def test_how_long_steps_wait_is_told_again_when_it_changes() -> None:
    tuned = Tuned()
    tuned.rounds(5, 10 * MB, waiting=0.3)
    tuned.rounds(5, 10 * MB, waiting=0.33)
    tuned.rounds(2, 10 * MB, waiting=0.9)  # a disturbance
    tuned.rounds(5, 10 * MB, waiting=0.3)
    tuned.rounds(5, 10 * MB, seconds=0.001, waiting=0.0)  # the network is fast now
    assert [measured.waiting for measured in tuned.measured] == pytest.approx([0.3, 0.0])


def test_a_worker_that_waits_says_so_where_a_codec_leaves_too_little_to_measure_a_rate() -> None:
    """Else slices of gradients of 1 % stay as small as the network's rate makes those of exact
    ones, and their number alone costs a third of the speed."""
    tuned = Tuned()
    tuned.rounds(6, 0.1 * MB, waiting=0.6)
    assert tuned.measured == [Measured(0.0, waiting=pytest.approx(0.6))]


def test_steps_that_only_wait_are_no_more_than_all_waiting() -> None:
    tuned = Tuned()
    tuned.times.step_s, tuned.times.parts = 0.1, Parts(network_s=0.1)
    tuned.next_step()
    for _ in range(6):
        tuned.drain.bytes, tuned.drain.seconds = tuned.drain.bytes + MB, tuned.drain.seconds + 0.5
        tuned.times.step_s += 0.1
        tuned.times.parts = tuned.times.parts.plus(Parts(network_s=0.1 + 1e-15))
        tuned.next_step()
    assert {measured.waiting for measured in tuned.measured} == {1.0}


def test_another_size_holds_from_the_first_round_that_nobody_may_have_pushed_for() -> None:
    tuned = Tuned()
    tuned.rounds(3, 10 * MB)
    tuned.tuning.want(SliceSizes(25_000))
    tuned.next_step()
    assert tuned.size(tuned.step + WINDOW - 1) == 100_000
    assert tuned.size(tuned.step + WINDOW) == 25_000


def test_rank_0_may_announce_a_size_before_this_worker_knows_the_first_one() -> None:
    tuned = Tuned(first_elems=None)
    for _ in range(2):  # each server passes it on
        tuned.tuning.adopt(5, SliceSizes(25_000))
    tuned.tuning.announce(INITIAL_ROUND, SliceSizes(100_000))
    assert [tuned.size(round_) for round_ in (INITIAL_ROUND, 4, 5)] == [100_000, 100_000, 25_000]


def test_the_credit_is_that_of_the_newest_size_whichever_was_set_last() -> None:
    early, in_order = Tuned(servers=1, first_elems=None), Tuned(servers=1)
    for tuned in (early, in_order):
        tuned.tuning.adopt(5, SliceSizes(12_500))
    early.tuning.announce(INITIAL_ROUND, SliceSizes(100_000))
    assert early.credits_bytes == in_order.credits_bytes


def test_servers_share_the_credit_by_what_they_keep() -> None:
    held = {server: Held() for server in range(3)}
    servers = cast(Dict[int, Connection], held)
    tuning = Tuning(
        0, servers, SliceSizesByRound(), Settings(), WINDOW, Drain(), StepTimes(),
        _egress(servers), cast(ControlClient, None),
    )  # fmt: skip
    tuning.announce(INITIAL_ROUND, SliceSizes(100_000))
    equal = held[0].credit_bytes
    assert {one.credit_bytes for one in held.values()} == {equal}
    tuning.note_kept({0: 1_000_000, 2: 3_000_000})
    tuning.begin_step(1)
    credits = [held[server].credit_bytes for server in range(3)]
    assert credits == [pytest.approx(0.75 * equal, abs=1), LEAST_CREDIT_BYTES, 2.25 * equal]


@pytest.mark.parametrize("layout", ["touched_rows", "sparse_rows"])
def test_rows_and_their_numbers_count_as_what_a_server_keeps(layout: str) -> None:
    row_bytes = 2 * 4 + 4
    declared = [
        DeclaredKey(0, "w", (2000, 2), "float32", [(0, 1000), (1, 3000)], layout=layout),
        DeclaredKey(1, "bias", (2,), "float16", [(2, 2)]),
    ]
    keys = [WorkerKey(one, BulkSynchronous(1)) for one in declared]
    assert keys[0].kept_bytes() == {0: 500 * row_bytes, 1: 1500 * row_bytes}
    assert keys[1].kept_bytes() == {2: 4}


def test_a_tiny_dense_key_beside_rows_takes_no_server_s_credit() -> None:
    with closing(MemoryJob(1, 2, 4000)) as job:
        rows = job.declare("w", 4000, 2, layout="touched_rows")
        [bias] = job.declare("bias", 2)
        assert len(rows[0].runs) == 2 and len(bias.runs) == 1
        worker = job.workers[0]
        equal = gradient_credit_bytes(4000, 2)
        for round_ in (INITIAL_ROUND, 1):
            worker.call(bias, round_, np.ones(2, np.float32), None)
            job.finish()
        credits = [connection.credit_bytes for connection in worker.servers.values()]
        assert credits == pytest.approx([equal, equal], rel=0.01)
        assert not worker.data_plane.tuning._egress.turns_pay


@pytest.mark.alone
@pytest.mark.long
def test_all_rows_come_as_fast_as_with_much_credit_beside_a_tiny_dense_key() -> None:
    """Over 8 KB of credit they took 16 times as long."""

    def pulled_s(**settings: object) -> float:
        result = run_job("all_rows.py", workers=2, servers=2, **settings)
        assert result.code == 0, result.output
        return max(float(text) for text in re.findall(r"pulled in ([\d.]+) s", result.output))

    assert pulled_s() < 5 * pulled_s(P3KV_SEND_BUFFER_BYTES=100_000)


def test_a_size_that_is_set_stays() -> None:
    tuned = Tuned(slice_size=100_000)
    tuned.rounds(20, 1 * MB)
    assert tuned.reports == []


@pytest.mark.parametrize("settings", [{}, {"slice_size": 100_000}])
def test_gradients_leave_in_turn_where_servers_keep_unequal_parts_and_steps_mostly_wait(
    settings: Dict[str, int],
) -> None:
    tuned = Tuned(servers=2, **settings)
    tuned.tuning.note_kept({0: 1000, 1: 950})
    tuned.rounds(10, 10 * MB, waiting=0.8)
    assert not tuned.egress.turns_pay
    tuned.tuning.note_kept({1: 1000})
    tuned.rounds(1, 10 * MB, waiting=0.8)
    assert tuned.egress.turns_pay
    for waiting, pays in ((0.45, True), (0.3, False), (0.45, False), (0.6, True)):
        tuned.rounds(5, 10 * MB, waiting=waiting)
        assert tuned.egress.turns_pay == pays


@pytest.mark.alone
@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_slices_become_small_when_the_network_becomes_slow() -> None:
    with Cluster(2, None) as cluster:
        started: List[Tuple[str, subprocess.Popen]] = start_on(
            cluster, "retuned.py", P3KV_VERBOSE=1
        )
        first = next(process for role, process in started if role == "worker")
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith(f"round {CALM_ROUNDS}"):
                cluster.set_rate(50.0)
        outputs = [(role, process.communicate(timeout=DEADLINE_S)[0]) for role, process in started]
    codes = [process.returncode for _, process in started]
    assert codes == [0] * len(started), outputs


def test_sizes_change_while_a_worker_pushes_ahead_and_another_pulls() -> None:
    result = run_job("resized.py", workers=2, servers=2)
    assert result.code == 0, result.output
    assert result.output.count("right whatever the size") == 2, result.output
