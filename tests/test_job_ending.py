"""How a job ends: in order, or with one reason that all are told."""

from __future__ import annotations

from typing import List

from hypothesis import given
from hypothesis import strategies as st

from p3kv.errors import PeerLostError
from p3kv.scheduler.job import Job, Replies
from p3kv.wire.messages import (
    UNKNOWN,
    Abort,
    BarrierReached,
    Bye,
    DeclareKey,
    Failure,
    Finished,
    Ready,
    ReportFailure,
    Roster,
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

# Leaving.


@given(st.permutations([0, 1, 2]))
def test_workers_may_leave_one_after_the_other_then_the_servers_are_told(order: List[int]) -> None:
    job = running(workers=3)
    for rank in order[:-1]:
        assert job.handle(worker(rank), Bye()) == []
    assert set(of(job.handle(worker(order[-1]), Bye()), Finished)) == {server(0), server(1)}
    assert not job.ended
    job.handle(server(1), Bye())
    job.handle(server(0), Bye())
    assert job.ended
    assert job.failure is None


def test_a_worker_that_leaves_before_its_store_while_others_have_theirs_ends_the_job() -> None:
    job = assembled()
    job.handle(worker(0), Ready(SLICE_SIZE, False))
    failure = aborted(job.handle(worker(1), Bye()), "ended while others", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)


def test_workers_that_never_create_a_store_are_no_failure() -> None:
    job = assembled()
    assert job.handle(worker(0), Bye()) == []
    assert set(of(job.handle(worker(1), Bye()), Finished)) == {server(0), server(1)}


def test_a_server_that_leaves_before_all_have_arrived_ends_the_job() -> None:
    job = Job(NAME, 2, 2)
    job.handle(server(0), hello("server"))
    job.handle(server(1), hello("server"))
    replies = job.handle(server(1), Bye())
    aborted(replies, "ended while others still needed it", PeerLostError)
    assert set(of(replies, Abort)) == {server(0)}


def test_a_worker_that_leaves_before_all_have_arrived_ends_the_job_when_it_is_missed() -> None:
    job = Job(NAME, 2, 1)
    job.handle(worker(1), hello("worker", 1))
    assert job.handle(worker(1), Bye()) == []
    job.handle(server(0), hello("server"))
    assert Roster in map(type, to(job.handle(worker(0), hello("worker", 0)), worker(0)))
    replies = job.handle(worker(0), Ready(SLICE_SIZE, False))
    failure = aborted(replies, "ended while others still needed it", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)


@given(st.permutations([worker(0), worker(1), server(0)]))
def test_scripts_that_end_at_once_and_want_no_store_are_no_failure(order: List[bytes]) -> None:
    job = Job(NAME, 2, 1)
    replies: Replies = []
    for identity in order:
        assert of(replies, Finished) == {}
        role = "server" if identity == server(0) else "worker"
        replies = job.handle(identity, hello(role))
        if role == "worker":
            replies = [*replies, *job.handle(identity, Bye())]
    assert set(of(replies, Finished)) == {server(0)}
    assert job.failure is None


def test_a_server_that_leaves_early_ends_the_job() -> None:
    job = running()
    failure = aborted(job.handle(server(1), Bye()), "ended while others", PeerLostError)
    assert (failure.role, failure.rank) == ("server", 1)


# Failing.


def test_a_job_fails_once_and_the_first_reason_stays() -> None:
    job = running()
    first = Failure("the first.", "worker", 1, 7)
    replies = job.handle(worker(0), ReportFailure(first))
    assert set(of(replies, Abort)) == {worker(0), worker(1), server(0), server(1)}
    for replies in (
        job.handle(worker(1), ReportFailure(Failure("the second.", "server", 0))),
        job.fail(Failure("the third.", "server", 0)),
        job.handle(worker(1), BarrierReached()),
        job.handle(worker(1), DeclareKey("w", (2,), "float32")),
    ):
        assert all(abort.failure == first for abort in of(replies, Abort).values())
        assert to(replies, worker(1)) == [Abort(first)]
    assert job.failure == first


def test_a_lost_process_is_named_and_the_others_are_told() -> None:
    job = running()
    node = job.node(worker(1))
    assert node is not None
    replies = job.lost(node)
    failure = aborted(replies, "ended without a word", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)
    assert "process 101" in failure.reason
    assert set(of(replies, Abort)) == {worker(0), server(0), server(1)}
    assert job.lost(node) == []


def test_a_process_that_left_in_order_is_not_lost() -> None:
    job = running()
    job.handle(worker(1), Bye())
    node = job.node(worker(1))
    assert node is not None
    assert job.lost(node) == []
    assert job.failure is None


def test_a_failed_job_ends_when_everybody_has_left_or_is_lost() -> None:
    job = running()
    job.fail(Failure("no.", "server", 0))
    for identity in (worker(0), worker(1), server(0)):
        assert not job.ended
        assert job.handle(identity, Bye()) == []
    node = job.node(server(1))
    assert node is not None
    job.lost(node)
    assert job.ended


def test_an_unassembled_job_that_failed_ends_when_those_who_came_have_left() -> None:
    job = Job(NAME, 2, 2)
    job.handle(b"w", hello("worker"))
    job.nobody_else_came(8.0)
    assert not job.ended
    job.handle(b"w", Bye())
    assert job.ended


def test_names_tell_role_rank_host_and_process() -> None:
    job = Job(NAME, 1, 1)
    job.handle(b"w", hello("worker"))
    node = job.node(b"w")
    assert node is not None
    assert node.rank == UNKNOWN
    assert node.name() == "worker (10.0.0.7, process 321)"
    job.handle(b"s", hello("server"))
    assert node.name() == "worker 0 (10.0.0.7, process 321)"
