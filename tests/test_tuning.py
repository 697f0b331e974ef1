"""The size of slices follows the network while a job trains, and changes no number."""

from __future__ import annotations

import subprocess
from typing import List, Tuple

import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.config import Settings
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.loop import Drain
from p3kv.wire.messages import Terms
from p3kv.wire.terms import TermsByRound
from p3kv.worker.tuning import Tuning
from tests.jobs import run_job, start_on

MB = 1_000_000
WINDOW = 3
CALM_ROUNDS = 4
"""How many rounds are made before the network changes."""


class Tuned:
    """A worker's tuning without servers, and what it says."""

    def __init__(self, **settings: int) -> None:
        self.drain = Drain()
        self.terms = TermsByRound()
        self.reports: List[float] = []
        self.tuning = Tuning(
            0, {}, self.terms, Settings(**settings), WINDOW, self.drain, self.reports.append
        )
        self.tuning.announce(INITIAL_ROUND, Terms(100_000))
        self.step = 0

    def rounds(self, count: int, rate_bytes_s: float, seconds: float = 0.5) -> None:
        for _ in range(count):
            self.drain.bytes += int(rate_bytes_s * seconds)
            self.drain.seconds += seconds
            self.next_step()

    def next_step(self) -> None:
        self.step += 1
        self.tuning.begin_step(self.step)

    def size(self, round: int) -> int:
        return self.terms.of(self.terms.generation(round)).slice_size


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


def test_another_size_holds_from_the_first_round_that_nobody_may_have_pushed_for() -> None:
    tuned = Tuned()
    tuned.rounds(3, 10 * MB)
    tuned.tuning.want(25_000)
    tuned.next_step()
    assert tuned.size(tuned.step + WINDOW - 1) == 100_000
    assert tuned.size(tuned.step + WINDOW) == 25_000


def test_a_size_that_is_set_stays() -> None:
    tuned = Tuned(slice_size=100_000)
    tuned.rounds(20, 1 * MB)
    assert tuned.reports == []


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
        outputs = [(role, process.communicate(timeout=60)[0]) for role, process in started]
    codes = [process.returncode for _, process in started]
    assert codes == [0] * len(started), outputs


def test_sizes_change_while_a_worker_pushes_ahead_and_another_pulls() -> None:
    result = run_job("resized.py", workers=2, servers=2)
    assert result.code == 0, result.output
    assert result.output.count("right whatever the size") == 2, result.output
