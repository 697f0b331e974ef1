"""Processes that are stopped, and hosts that can't be reached, are waited for: nothing is lost."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.wire.messages import PeerSilent
from p3kv.wire.silence import Silence, words
from tests.jobs import DEADLINE_S, SUMS_ONLY, eventually, start_on

STOPPED_S, CUT_S = 7.0, 7.0
"""Longer than it takes until a warning."""


def test_a_silence_is_told_after_some_time_and_whenever_it_has_doubled_and_when_it_ends() -> None:
    silence = Silence(100.0, warn_after_s=6.0)
    assert [silence.due_s(now) for now in (105.9, 106.0, 111.9, 112.0)] == [None, 6.0, None, 12.0]
    assert silence.due_s(125.5) == 25.5
    assert silence.due_s(147.9) is None
    assert silence.heard(148.0) == 48.0
    assert silence.due_s(153.9) is None
    assert silence.heard(153.9) is None
    assert silence.due_s(159.9) == pytest.approx(6.0)


def test_a_pause_of_one_s_own_is_not_the_other_s_silence() -> None:
    silence = Silence(100.0, warn_after_s=6.0)
    silence.leave_out(20.0, now=121.0)
    assert silence.lasts_s(121.0) == 1.0
    silence.leave_out(20.0, now=122.0)
    assert silence.lasts_s(122.0) == 0.0


def test_signs_of_life_come_every_two_seconds_so_nobody_is_silent_before_five() -> None:
    silence = Silence(100.0, warn_after_s=0.1)
    assert [silence.due_s(now) for now in (104.9, 105.0)] == [None, 5.0]


def test_a_warning_says_who_since_when_why_and_how_long_the_job_waits() -> None:
    said = words(PeerSilent("worker 1 (10.0.0.2, process 7)", 12.3, 120.0))
    assert re.fullmatch(
        r"worker 1 \(10.0.0.2, process 7\) has not answered for 12 s, and was last heard of at "
        r"\d\d:\d\d:\d\d\. Its process is stopped, .* The job goes on when it answers, and ends if "
        r"it is silent for 120 s \(P3KV_SILENCE_TIMEOUT_S\)\.",
        said,
    )


@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_a_worker_whose_gradient_is_on_its_way_is_told_that_it_is_the_network() -> None:
    with Cluster(2) as cluster:
        cluster.set_rate(100.0, cluster.hosts[1])
        settings = {"P3KV_WARN_AFTER_S": 1, **SUMS_ONLY}
        started = start_on(cluster, "one_push.py", ["all"], servers=1, **settings)
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for _, process in started]
    assert all(process.returncode == 0 for _, process in started), outputs
    workers = [output for (role, _), output in zip(started, outputs) if role == "worker"]
    waits = "worker [01] has not pushed .* for which worker [01] waited"
    assert re.search(f"{waits}.* Its own output may say why. All workers must", workers[0]), outputs
    assert re.search(f"{waits}.* This worker has pushed it: it is on its way", workers[1]), outputs
    # Of the other one it may have heard before, on a busy machine.
    assert "That is this worker" not in workers[1], outputs


@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_a_job_goes_on_exactly_after_a_pause_of_each_role_and_after_a_cut_link(
    tmp_path: Path,
) -> None:
    def rounds() -> int:
        file = tmp_path / "rounds"
        return int(file.read_text()) if file.exists() else 0

    def goes_on() -> None:
        before = rounds()
        # TCP tries again after at most as long as the cut took.
        eventually(lambda: rounds() > before + 20, timeout_s=3 * CUT_S + 15)

    with Cluster(2) as cluster:
        started = start_on(cluster, "counting.py", [tmp_path], P3KV_WARN_AFTER_S=2)
        goes_on()
        stopped = [process for role, process in started if role == "scheduler"]
        stopped += [process for _, process in started[-2:]]  # server and worker of the last host
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        goes_on()
        with cluster.cut(cluster.hosts[1]):
            time.sleep(CUT_S)
        goes_on()
        (tmp_path / "stop").touch()
        outputs = [(role, process.communicate(timeout=DEADLINE_S)[0]) for role, process in started]
    assert all(process.returncode == 0 for _, process in started), outputs
    workers = [output for role, output in outputs if role == "worker"]
    assert all("exact in" in output for output in workers)
    silent, answers = r"has not answered for \d+ s, and was last heard of", r"answers again, after"
    for said in (silent, answers):
        assert all(re.search(rf"the scheduler {said}", output) for output in workers), outputs
        for role in ("worker", "server"):
            who = rf"{role} \d \({cluster.hosts[1].address}, process \d+\)"
            assert re.search(rf"{who} {said}", workers[0]), outputs
    # The scheduler does not take its own pause for that of the others.
    others = rf"(worker|server) \d \({cluster.hosts[0].address}, process \d+\)"
    assert not any(re.search(rf"{others} has not", output) for output in workers), outputs
