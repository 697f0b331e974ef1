"""How a job ends: in order, or with one reason that all are told."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.errors import PeerLostError, RendezvousError
from p3kv.scheduler.job import Job, Replies
from p3kv.wire.launcher_link import PartEnded
from p3kv.wire.messages import (
    UNKNOWN,
    Abort,
    Alive,
    BarrierReached,
    Bye,
    DeclareKey,
    Failure,
    Finished,
    JobSettings,
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
    job.handle(worker(0), Ready(JobSettings(SLICE_SIZE)))
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
    replies = job.handle(worker(0), Ready(JobSettings(SLICE_SIZE)))
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
    job.lost(node, silent_s=1.0)
    assert job.failure is None
    assert job.undecided
    replies = job.judge()
    failure = aborted(replies, "its process ended without a word", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)
    assert "process 101" in failure.reason
    assert set(of(replies, Abort)) == {worker(0), server(0), server(1)}
    assert not job.undecided
    assert job.judge() == []


def worker_1_lost(round_: int) -> ReportFailure:
    return ReportFailure(
        Failure("it was lost: its connection was reset", "worker", 1, round_), True
    )


def test_who_knows_why_is_believed_before_those_who_lost_a_connection() -> None:
    job = running()
    assert job.handle(server(0), worker_1_lost(7)) == []
    why = Failure("it broke the protocol: it sent nonsense", "worker", 1, 7)
    replies = job.handle(server(1), ReportFailure(why))
    assert aborted(replies, "it sent nonsense", PeerLostError) == why
    assert job.judge() == []


def test_of_a_lost_process_the_launcher_knows_the_end_and_the_peers_the_round() -> None:
    job = running()
    node = job.node(worker(1))
    assert node is not None
    job.handle(server(0), worker_1_lost(6))
    job.lost(node, silent_s=1.0)
    job.handle(server(1), worker_1_lost(7))
    job.process_ended(PartEnded("worker", 1, 137, "SIGKILL"))
    assert not job.ended
    failure = aborted(job.judge(), "its process was killed by SIGKILL", PeerLostError)
    assert (failure.role, failure.rank, failure.round) == ("worker", 1, 7)
    assert "out-of-memory" in failure.hint


def script_lost_another(job: Job, rank: int) -> None:
    """A script ends since its process group has lost a rank, and its worker says goodbye."""
    reason = "its script ended with RuntimeError: Connection reset by peer"
    report = ReportFailure(Failure(reason, "worker", rank, 7), second_hand=True)
    assert job.handle(worker(rank), report) == []
    assert job.handle(worker(rank), Bye()) == []
    assert job.undecided and job.has_followers and not job.ended


def test_a_script_that_has_lost_another_process_is_not_named_before_that() -> None:
    job = running()
    script_lost_another(job, 0)
    assert not job.knows_followed
    for identity in (server(1), worker(1)):  # which was beside the worker
        node = job.node(identity)
        assert node is not None
        job.lost(node, silent_s=1.0)
    assert job.knows_followed
    failure = aborted(job.judge(), "its process ended without a word", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)


def test_of_two_ended_processes_that_whose_script_had_lost_another_is_not_named() -> None:
    job = running()
    script_lost_another(job, 0)
    job.process_ended(PartEnded("worker", 0, 1, ""))
    assert not job.knows_followed
    job.process_ended(PartEnded("worker", 1, 137, "SIGKILL"))
    assert job.knows_followed
    failure = aborted(job.judge(), "its process was killed by SIGKILL", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)


def test_a_script_that_has_lost_another_process_is_named_where_nobody_is_lost() -> None:
    job = running()
    script_lost_another(job, 0)
    failure = aborted(job.judge(), "its script ended with RuntimeError", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 0) and "in order" not in failure.hint


def test_a_worker_that_has_ended_in_order_is_named_where_a_script_s_connection_to_it_ends() -> None:
    job = running()
    job.handle(worker(1), Bye())
    script_lost_another(job, 0)
    failure = aborted(job.judge(), "its script ended with RuntimeError", PeerLostError)
    assert failure.hint.startswith("worker 1 had ended in order before"), failure.hint


def test_a_process_that_was_silent_is_not_said_to_have_ended() -> None:
    job = running()
    node = job.node(worker(1))
    assert node is not None
    job.lost(node, silent_s=7.2)
    failure = aborted(job.judge(), "it has not answered for 7 s", PeerLostError)
    assert "stopped" in failure.hint
    assert "out-of-memory" not in failure.words
    assert failure.round == UNKNOWN
    assert job.unreached() == ["worker 1"]


def test_the_round_of_a_lost_process_is_the_last_one_that_it_or_its_peers_have_told() -> None:
    for told, seen, expected in ((7, None, 7), (7, 9, 9), (7, 6, 7)):
        job = running()
        node = job.node(worker(1))
        assert node is not None
        job.handle(worker(1), Alive(round=told))
        job.handle(worker(1), Alive())
        if seen is not None:
            job.handle(server(0), worker_1_lost(seen))
        job.lost(node, silent_s=7.2)
        assert aborted(job.judge(), "it has not answered", PeerLostError).round == expected


def test_a_connection_that_only_peers_have_lost_is_told_in_their_words() -> None:
    job = running()
    job.handle(server(1), worker_1_lost(7))
    failure = aborted(
        job.judge(), "it was lost: its connection was reset (seen by server 1)", PeerLostError
    )
    assert failure.round == 7


@pytest.mark.parametrize("code", [0, 2])
def test_a_process_that_ends_before_it_joins_is_not_waited_for(code: int) -> None:
    job = Job(NAME, 2, 1)
    job.handle(server(0), hello("server", 0))
    job.process_ended(PartEnded("worker", 1, code))
    failure = aborted(
        job.judge(), f"ended with exit code {code} before it joined the job", RendezvousError
    )
    assert (failure.role, failure.rank) == ("worker", 1)
    assert ("import p3kv" in failure.hint) == (code == 0)
    assert job.unreached() == ["worker 0", "worker 1"]


def test_last_words_that_come_after_the_end_of_their_process_count() -> None:
    job = running()
    job.process_ended(PartEnded("worker", 1, 0))
    job.handle(worker(1), Bye())
    assert job.judge() == []
    assert job.failure is None
    job.process_ended(PartEnded("worker", 1, 0))
    assert not job.undecided
    node = job.node(worker(0))
    assert node is not None
    job.lost(node, silent_s=1.0)
    assert not job.ended
    job.handle(worker(0), Bye())
    assert job.judge() == []
    assert job.failure is None


def test_a_process_that_left_in_order_and_ends_with_an_error_ends_the_job() -> None:
    job = running()
    job.handle(worker(1), Bye())
    job.process_ended(PartEnded("worker", 1, 3))
    aborted(job.judge(), "ended with exit code 3, though it had left", PeerLostError)


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_that_ends_without_leaving_ends_the_job(code: int) -> None:
    job = running()
    job.process_ended(PartEnded("server", 1, code))
    aborted(job.judge(), f"ended with exit code {code}", PeerLostError)


def test_what_ends_after_the_job_has_failed_changes_nothing() -> None:
    job = running()
    job.fail(Failure("no.", "server", 0))
    job.process_ended(PartEnded("worker", 1, 1))
    assert not job.undecided
    assert job.judge() == []


def test_who_says_to_be_alive_is_answered() -> None:
    job = running()
    assert job.handle(worker(0), Alive()) == [(worker(0), Alive())]


def test_a_process_that_left_in_order_is_not_lost() -> None:
    job = running()
    job.handle(worker(1), Bye())
    node = job.node(worker(1))
    assert node is not None
    job.lost(node, silent_s=1.0)
    assert not job.undecided
    assert job.judge() == []
    assert job.failure is None


def test_a_failed_job_ends_when_everybody_has_left_or_is_lost() -> None:
    job = running()
    job.fail(Failure("no.", "server", 0))
    for identity in (worker(0), worker(1), server(0)):
        assert not job.ended
        assert job.handle(identity, Bye()) == []
    node = job.node(server(1))
    assert node is not None
    job.lost(node, silent_s=1.0)
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
