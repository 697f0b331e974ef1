"""Nobody waits in silence for a worker that does not push: who is missing is said, then ended."""

from __future__ import annotations

import re
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import List

import numpy as np
import pytest

from p3kv.server.engine import Blame, Wait
from p3kv.server.stragglers import LOOK_EVERY_S, Stalls
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.wire.messages import DeclaredKey, ReportFailure, SliceSizes, Stalled, encode, waited
from tests.engines import engine_of, one_slice
from tests.faults import stopped
from tests.in_memory import MemoryJob
from tests.jobs import DEADLINE_S, SUMS_ONLY, TrainingJob, run_job
from tests.served import TOLD_S, Served, frame, received, shake_hands

STATE = one_slice(engine_of(2), DeclaredKey(3, 0, (8,), "float32", [(0, 8)], "dense0_weight"))


class Heard:
    """What a server's `Stalls` tell, and whom they give up."""

    def __init__(self, timeout_s: float) -> None:
        self.told: List[Stalled] = []
        self.given_up: List[Blame] = []
        self.stalls = Stalls(10.0, timeout_s)

    def look(self, begin_s: float, end_s: float, since_s: float) -> None:
        """Looks as often as a server does, while two rounds wait."""
        now_s = begin_s
        while now_s <= end_s:
            waits = [Wait(STATE, 5, [1], [0], since_s), Wait(STATE, 6, [1], [0], since_s + 1)]
            self.look_at([w for w in waits if now_s - w.since_s >= self.stalls.first_s], now_s)
            now_s += LOOK_EVERY_S

    def look_at(self, waits: List[Wait], now_s: float) -> None:
        found = self.stalls.look(waits, now_s)
        if isinstance(found, Blame):
            self.given_up.append(found)
        elif found is not None:
            self.told.append(found)


def test_a_wait_is_told_after_ten_seconds_and_whenever_it_has_doubled() -> None:
    heard = Heard(1800.0)
    heard.look(100.0, 200.0, since_s=100.0)
    assert [one.waited_s for one in heard.told] == [10, 20, 40, 80]
    first = heard.told[0]
    assert (first.key_id, first.round, first.missing, first.arrived) == (3, 5, [1], [0])
    assert first.called == "parameter 'dense0_weight' (key 0)"
    # The next one is told of from its beginning.
    heard.look_at([], 201.0)
    heard.look(202.0, 320.0, since_s=300.0)
    assert [one.waited_s for one in heard.told[4:]] == [10, 20]
    assert not heard.given_up


def test_after_the_timeout_the_worker_that_is_missing_ends_the_job() -> None:
    heard = Heard(30.0)
    heard.look(0.0, 30.0, since_s=0.0)
    [(rank, reason, hint)] = heard.given_up
    assert rank == 1
    for words in (
        "parameter 'dense0_weight' (key 0) in round 5", "worker 0 waited 30 s",
        "P3KV_STALL_TIMEOUT_S",
    ):  # fmt: skip
        assert words in reason
    assert "the same parameters as the others" in hint


def test_who_has_waited_is_told_if_anybody_has() -> None:
    assert waited([2, 0], 10.9) == "for which workers 0, 2 waited 10 s"
    # Where a worker sends a large initial value, it is the only one so far.
    assert waited([], 10.9) == "for 10 s"


def test_a_worker_that_others_do_not_wait_for_at_once_has_longer() -> None:
    heard = Heard(30.0)
    for now_s in range(100, 151):
        heard.look_at([Wait(STATE, 5, [1], [0], 100.0, patience_s=20.0)], float(now_s))
        assert bool(heard.given_up) == (now_s == 150)
    assert {one.timeout_s for one in heard.told} == {50.0}


@pytest.mark.parametrize(("streaming", "has_patience"), [("true", True), ("false", False)])
def test_workers_go_on_as_long_as_between_two_rounds_where_keys_take_turns(
    streaming: str, has_patience: bool
) -> None:
    with closing(MemoryJob(2, 1, 8, f"local:steps=5,streaming={streaming}")) as job:
        keys, array = job.declare("w", 8), np.ones(8, np.float32)
        for round_ in range(3):
            for worker, key in zip(job.workers, keys):
                if round_ or key is keys[0]:
                    worker.call(key, round_, array, array if round_ else None)
            job.finish()
        job.workers[0].call(keys[0], 3, array, array)
        job.finish()
        [wait] = job.servers[0].consumer.engine.longest_waits(0.0, time.monotonic())
        assert (wait.round, wait.missing, wait.patience_s > 0) == (3, [1], has_patience)


def test_a_server_s_own_pause_is_not_time_that_it_has_waited_for_a_worker() -> None:
    heard = Heard(30.0)
    heard.look(100.0, 104.0, since_s=100.0)
    heard.look(170.0, 179.0, since_s=100.0)
    assert not heard.told
    heard.look(180.0, 199.0, since_s=100.0)
    assert [one.waited_s for one in heard.told] == [10, 20]
    assert not heard.given_up


def test_a_worker_is_not_blamed_for_what_it_pushed_while_the_server_was_stopped(
    tmp_path: Path,
) -> None:
    with TrainingJob(tmp_path, 2, 1, script="one_late.py", P3KV_WARN_AFTER_S=4) as job:
        job.wait_until_training()
        time.sleep(0.5)  # until worker 0's push is there
        with stopped([job.parts()["server 0"]]):
            (tmp_path / "push").touch()
            time.sleep(6.0)
        result = job.result(timeout_s=DEADLINE_S)
    assert result.code == 0, result.output
    assert "not pushed" not in result.output, result.output


@pytest.mark.parametrize(
    ("how", "missing", "what", "mine"),
    [
        (
            "skips",
            "1",
            r"parameter 'net_dense0_weight' \(key 1\) in round 3",
            "That is this worker.",
        ),
        # At the same time worker 1 begins to wait for what worker 0 does after that.
        pytest.param(
            "more",
            "[01]",
            "in round 1|its initial value",
            "which does not have it",
            marks=pytest.mark.long,
        ),
        ("unknown", "0", "its initial value", "which does not have it"),
    ],
)
def test_a_push_that_is_missing_is_named_on_every_worker_and_then_ends_the_job(
    how: str, missing: str, what: str, mine: str
) -> None:
    # Whoever skips a gradient has servers that update; the others do not get as far.
    who_updates = {} if how == "skips" else SUMS_ONLY
    result = run_job("skips.py", [how], workers=2, servers=2, P3KV_STALL_TIMEOUT_S=8, **who_updates)
    assert result.code == 1, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}").splitlines()
        # Each may come to wait for the other.
        found = [re.search(f"worker: worker ({missing}) has not .*({what}).*", one) for one in said]
        first = next(filter(None, found), None)
        assert first is not None, result.output
        assert "'net_dense" in first[0]
        assert (mine in first[0]) == (rank == int(first[1]))
    for name in ("server 0", "server 1", "scheduler", "worker 0", "worker 1"):
        assert "P3KV_STALL_TIMEOUT_S" in result.said_by(name), result.output


def test_a_worker_whose_round_number_is_wrong_is_named_and_nobody_who_waits_for_it() -> None:
    served = Served(2)
    links: List[socket.socket] = []
    try:
        address = served.welcome()
        for rank in range(2):
            links.append(socket.create_connection(address, timeout=TOLD_S))
            shake_hands(links[rank], rank, stall_timeout_s=2.0)
            assert received(links[rank])[0].kind == Kind.WELCOME
        declared = DeclaredKey(0, 0, (8,), "float32", [(0, 8)], "dense0_weight")
        for rank, link in enumerate(links):
            link.sendall(frame(Kind.SLICE_SIZES, rank, encode(SliceSizes(8))))
            link.sendall(frame(Kind.KEY, rank, encode(declared)))
        links[0].sendall(frame(Kind.PUSH, 0, bytes(32), round=INITIAL_ROUND))
        links[0].sendall(frame(Kind.PUSH, 0, bytes(32), round=2, step=1))
        # The server has read these words when it answers.
        links[0].sendall(frame(Kind.PROBE, 0, bytes(4)))
        assert received(links[0])[0].kind == Kind.PROBE
        links[1].sendall(frame(Kind.PUSH, 1, bytes(32), round=1, step=1))
        report = served.hear()
        assert isinstance(report, ReportFailure)
        assert (report.failure.role, report.failure.rank) == ("worker", 0), report
        assert "has not pushed parameter 'dense0_weight' (key 0) in round 1" in (
            report.failure.reason
        )
    finally:
        for link in links:
            link.close()
        served.close()
