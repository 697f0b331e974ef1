"""How processes become a job: who is let in, which ranks they get, who is missed."""

from __future__ import annotations

import re
from typing import Any, List, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.errors import RendezvousError
from p3kv.scheduler.job import Job, Replies
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    BarrierReached,
    Bye,
    DeclareKey,
    Failure,
    Hello,
    JobSettings,
    Ready,
    Refused,
    ReportFailure,
    Roster,
    Welcomed,
)
from tests.scheduled import (
    NAME,
    SLICE_SIZE,
    aborted,
    assembled,
    hello,
    of,
    running,
    server,
    to,
    worker,
)


@given(st.permutations([(0, None), (3, 1), (5, 9), (None, 4), (None, 7), (None, None)]))
def test_a_stated_rank_is_kept_and_others_get_what_is_free_by_number_then_by_arrival(
    workers: List[Tuple[Optional[int], Optional[int]]],
) -> None:
    job = Job(NAME, len(workers), 1)
    job.handle(b"server", hello("server"))
    replies: Replies = []
    for rank, task in workers:
        assert not job.assembled
        replies = job.handle(f"{rank} {task}".encode(), hello("worker", rank, task=task))
    ranks = {one: roster.rank for one, roster in of(replies, Roster).items() if one != b"server"}
    assert ranks == {
        b"0 None": 0, b"None 4": 1, b"None 7": 2, b"3 1": 3, b"None None": 4, b"5 9": 5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (hello("worker", 1), r"rank 1 is taken: another worker has it \(10.0.0.7, process 321\)"),
        (hello("worker", 3), "worker 3 is out of range: this job has 3 workers.* ranks 0 to 2"),
        (hello("worker", -1), "worker -1 is out of range.* RANK"),
        (hello("worker", task=4), "number 4 is taken.* set DMLC_WORKER_ID to a rank of its own"),
        (hello("server", 0), "rank 0 is taken: another server has it.*DMLC_SERVER_ID"),
        (hello("server", 5), "server 5 is out of range: this job has 2 servers"),
    ],
    ids=["taken", "too large", "negative", "task", "server's, taken", "server's, too large"],
)
def test_a_rank_that_is_taken_or_out_of_range_is_refused_and_leaves_no_trace(
    wrong: Hello, reason: str
) -> None:
    job = Job(NAME, 3, 2)
    job.handle(server(0), hello("server", 0))
    job.handle(worker(1), hello("worker", 1))
    job.handle(b"4th", hello("worker", task=4))
    ((receiver, refused),) = job.handle(b"x", wrong)
    assert (receiver, isinstance(refused, Refused)) == (b"x", True)
    assert re.search(reason, refused.reason), refused.reason
    job.handle(server(1), hello("server", 1))
    ranks = {one: it.rank for one, it in of(job.handle(b"w", hello("worker")), Roster).items()}
    assert ranks == {server(0): 0, server(1): 1, worker(1): 1, b"4th": 0, b"w": 2}


@given(st.permutations([("server", 0), ("server", 1), ("worker", 0), ("worker", 1), ("worker", 2)]))
def test_everybody_gets_the_same_roster_when_the_last_one_arrives(
    arrivals: List[Tuple[str, int]],
) -> None:
    job = Job(NAME, 3, 2)
    replies: Replies = []
    for number, (role, wish) in enumerate(arrivals):
        assert of(replies, Roster) == {}
        identity = f"{role} {wish}".encode()
        replies = job.handle(identity, hello(role, wish, port=4000 + wish, pid=number))
        assert to(replies, identity)[0] == Welcomed()
    rosters = of(replies, Roster)
    assert len(rosters) == 5
    assert {roster.token for roster in rosters.values()} == {rosters[worker(0)].token}
    for role, wish in arrivals:
        roster = rosters[f"{role} {wish}".encode()]
        assert roster.rank == wish
        assert roster.servers == [("10.0.0.7", 4000, "tcp"), ("10.0.0.7", 4001, "tcp")]
        assert len(roster.workers) == 3


def test_every_job_has_a_token_of_its_own() -> None:
    tokens = set()
    for _ in range(3):
        job = Job(NAME, 1, 1)
        job.handle(b"s", hello("server"))
        tokens.add(of(job.handle(b"w", hello("worker")), Roster)[b"w"].token)
    assert len(tokens) == 3
    assert all(len(token) >= 16 for token in tokens)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (hello("worker", protocol=PROTOCOL_VERSION + 1, version="9.9"), "p3kv 9.9"),
        (hello("worker", job="another"), "runs another job"),
        (hello("scheduler"), "no role 'scheduler'"),
        (hello("observer"), "no role 'observer'"),
    ],
    ids=["protocol", "job", "scheduler", "role"],
)
def test_who_does_not_belong_to_the_job_is_refused_with_the_reason(
    message: Hello, reason: str
) -> None:
    job = Job(NAME, 1, 1)
    ((receiver, refused),) = job.handle(b"x", message)
    assert receiver == b"x"
    assert isinstance(refused, Refused)
    assert reason in refused.reason and NAME not in refused.reason
    # It leaves no trace: the job goes on without it.
    assert job.node(b"x") is None
    assert job.failure is None
    job.handle(b"s", hello("server"))
    assert len(of(job.handle(b"w", hello("worker")), Roster)) == 2


@pytest.mark.parametrize("role", ["worker", "server"])
def test_one_more_than_wanted_is_refused(role: str) -> None:
    job = assembled()
    ((_, refused),) = job.handle(b"x", hello(role))
    assert isinstance(refused, Refused)
    assert f"the job has its 2 {role}s already" in refused.reason


def test_a_second_hello_of_a_process_is_refused() -> None:
    job = Job(NAME, 2, 1)
    job.handle(b"w", hello("worker"))
    ((_, refused),) = job.handle(b"w", hello("worker"))
    assert isinstance(refused, Refused)
    assert "before" in refused.reason


@pytest.mark.parametrize(
    "message",
    [
        Ready(JobSettings(SLICE_SIZE)),
        DeclareKey("w", (2,), "float32"),
        BarrierReached(),
        Bye(),
        ReportFailure(Failure("no", "worker", 0)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_who_has_not_said_hello_can_do_nothing(message: Any) -> None:
    job = running()
    ((receiver, refused),) = job.handle(b"stranger", message)
    assert receiver == b"stranger"
    assert isinstance(refused, Refused)
    assert job.failure is None


def test_the_missing_are_counted_when_nobody_else_comes() -> None:
    job = Job(NAME, 3, 2)
    job.handle(b"s", hello("server"))
    job.handle(b"w", hello("worker"))
    replies = job.nobody_else_came(8.0)
    failure = aborted(replies, "1 of 3 workers arrived and 1 of 2 servers arrived", RendezvousError)
    assert "for 8 s" in failure.reason
    assert set(of(replies, Abort)) == {b"s", b"w"}


def test_who_came_from_where_and_who_is_missing_is_told() -> None:
    job = Job(NAME, 3, 2)
    nobody = "waiting for 3 workers, 2 servers; 0 of 3 workers and 0 of 2 servers have come. "
    assert job.who_came().startswith(nobody)
    job.handle(b"s", hello("server", 1))
    job.handle(b"w", hello("worker", 2, host="10.0.0.8"))
    assert job.who_came() == (
        "waiting for worker 0, worker 1, server 0; 1 of 3 workers and 1 of 2 servers have come "
        "(10.0.0.8: worker 2; 10.0.0.7: server 1). "
        "A worker has come once its script does 'import p3kv': make that its first import, or "
        "start the script as 'p3kv run train.py'."
    )


def test_scripts_are_not_suspected_where_only_servers_are_missing() -> None:
    job = Job(NAME, 1, 1)
    job.handle(b"w", hello("worker"))
    assert job.who_came().startswith("waiting for 1 server; 1 of 1 worker and 0 of 1 server have ")
    assert "import" not in job.who_came()


def test_who_comes_to_a_failed_job_is_told_why_it_failed() -> None:
    job = Job(NAME, 2, 1)
    job.handle(b"w", hello("worker"))
    job.nobody_else_came(8.0)
    replies = job.handle(b"late", hello("worker"))
    assert to(replies, b"late")[0] == Welcomed()
    assert to(replies, b"late")[1] == Abort(job.failure)
