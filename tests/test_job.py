"""The scheduler's decisions, without any socket: messages in, messages out."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import (
    ConfigError,
    KeyMismatchError,
    PeerLostError,
    ProtocolError,
    RendezvousError,
)
from p3kv.scheduler.job import Job, Replies
from p3kv.slicing import loads_with, place
from p3kv.version import VERSION
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    UNKNOWN,
    Abort,
    Agreed,
    BarrierPassed,
    BarrierReached,
    Bye,
    DeclareKey,
    Failure,
    Finished,
    Hello,
    KeyDeclared,
    KeyRefused,
    Measured,
    NewSliceSize,
    Ready,
    Refused,
    ReportFailure,
    Roster,
    SliceSize,
    ToScheduler,
    Welcomed,
)

NAME = "127.0.0.1:9000/2w2s"
SLICE_SIZE = 100


def hello(role: str, wish: Optional[int] = None, **changes: Any) -> Hello:
    fields: Dict[str, Any] = {
        "protocol": PROTOCOL_VERSION,
        "version": VERSION,
        "job": NAME,
        "role": role,
        "rank_wish": wish,
        "host": "10.0.0.7",
        "port": 4000 if role == "server" else 0,
        "pid": 321,
    }
    return Hello(**{**fields, **changes})


def to(replies: Replies, identity: bytes) -> List[Any]:
    """What one node is told."""
    return [message for receiver, message in replies if receiver == identity]


def of(replies: Replies, kind: type) -> Dict[bytes, Any]:
    """All messages of a kind, each node's own; nobody gets two."""
    found = [(receiver, message) for receiver, message in replies if isinstance(message, kind)]
    assert len(dict(found)) == len(found)
    return dict(found)


def worker(rank: int) -> bytes:
    return b"worker %d" % rank


def server(rank: int) -> bytes:
    return b"server %d" % rank


def assembled(workers: int = 2, servers: int = 2) -> Job:
    job = Job(NAME, workers, servers)
    for rank in range(servers):
        job.handle(server(rank), hello("server", port=4000 + rank))
    for rank in range(workers):
        job.handle(worker(rank), hello("worker", pid=100 + rank))
    assert job.assembled
    return job


def running(workers: int = 2, servers: int = 2) -> Job:
    job = assembled(workers, servers)
    for rank in range(workers):
        job.handle(worker(rank), Ready(SLICE_SIZE, False))
    return job


def aborted(replies: Replies, reason: str, error: type) -> Failure:
    """All Aborts say the same; returns the failure."""
    failures = [message.failure for message in of(replies, Abort).values()]
    assert failures, "nobody was told"
    assert all(failure == failures[0] for failure in failures)
    assert reason in failures[0].reason
    assert failures[0].error == error.__name__
    return failures[0]


# Arriving.


@given(st.permutations([None, None, None, 0, 1, 5, 5, 7]))
def test_ranks_go_by_wish_then_by_arrival(wishes: List[Optional[int]]) -> None:
    job = Job(NAME, len(wishes), 1)
    job.handle(b"server", hello("server"))
    replies: Replies = []
    for number, wish in enumerate(wishes):
        assert not job.assembled
        replies = job.handle(b"%d" % number, hello("worker", wish))
    rosters = of(replies, Roster)
    order = sorted(range(len(wishes)), key=lambda n: (wishes[n] is None, wishes[n] or 0, n))
    assert [rosters[b"%d" % number].rank for number in order] == list(range(len(wishes)))


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
        assert roster.servers == [("10.0.0.7", 4000), ("10.0.0.7", 4001)]
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
        (hello("worker", job="another"), "not 'another'"),
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
    assert reason in refused.reason
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
    assert f"all 2 {role}s of the job have arrived already" in refused.reason


def test_a_second_hello_of_a_process_is_refused() -> None:
    job = Job(NAME, 2, 1)
    job.handle(b"w", hello("worker"))
    ((_, refused),) = job.handle(b"w", hello("worker"))
    assert isinstance(refused, Refused)
    assert "before" in refused.reason


@pytest.mark.parametrize(
    "message",
    [
        Ready(SLICE_SIZE, False),
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


def test_who_comes_to_a_failed_job_is_told_why_it_failed() -> None:
    job = Job(NAME, 2, 1)
    job.handle(b"w", hello("worker"))
    job.nobody_else_came(8.0)
    replies = job.handle(b"late", hello("worker"))
    assert to(replies, b"late")[0] == Welcomed()
    assert to(replies, b"late")[1] == Abort(job.failure)


# Agreeing on settings.


def test_settings_hold_when_all_workers_have_them() -> None:
    job = assembled()
    assert job.handle(worker(1), Ready(SLICE_SIZE, True)) == []
    replies = job.handle(worker(0), Ready(SLICE_SIZE, True))
    assert of(replies, Agreed) == {
        worker(0): Agreed(SLICE_SIZE, True),
        worker(1): Agreed(SLICE_SIZE, True),
    }


def measuring(workers: int = 2) -> Job:
    job = assembled(workers)
    for rank in range(workers):
        job.handle(worker(rank), Ready(None, False))
    return job


def test_the_slowest_worker_decides_how_large_slices_are() -> None:
    job = measuring()
    assert job.handle(worker(1), Measured(1e9)) == []
    replies = job.handle(worker(0), Measured(105e6))
    assert of(replies, SliceSize) == {worker(rank): SliceSize(50_000) for rank in range(2)}
    ((_, answer),) = job.handle(worker(0), DeclareKey("w", (120_000,), "float32"))
    assert answer.runs == [(0, 70_000), (1, 50_000)]
    ((_, answer),) = job.handle(worker(0), DeclareKey("v", (120_001,), "float32"))
    assert answer.runs == [(1, 70_001), (0, 50_000)]
    ((_, answer),) = job.handle(worker(0), DeclareKey("u", (1,), "float32"))
    assert answer.runs == [(0, 1)]


def test_slices_follow_the_slowest_worker_when_the_network_changes_much() -> None:
    job = measuring()
    for rank, rate in ((0, 180e6), (1, 105e6)):
        job.handle(worker(rank), Measured(rate))
    assert job.handle(worker(0), Measured(900e6)) == []  # the other one is as slow as before
    assert job.handle(worker(1), Measured(70e6)) == []
    assert job.handle(worker(1), Measured(210e6)) == []  # twice the size: not worth it
    assert job.handle(worker(1), Measured(525e6)) == [(worker(0), NewSliceSize(200_000))]
    assert job.handle(worker(1), Measured(262e6)) == []
    assert job.handle(worker(0), Measured(1e6)) == [(worker(0), NewSliceSize(25_000))]


def test_a_size_that_was_set_is_not_measured_later_either() -> None:
    job = running(workers=2)
    replies = job.handle(worker(0), Measured(1e9))
    ((_, abort), *_) = replies
    assert isinstance(abort, Abort) and "Measured out of turn" in abort.failure.reason


@pytest.mark.parametrize(
    "message",
    [
        DeclareKey("w", (2,), "float32"),
        Measured(float("nan")),
        Measured(float("inf")),
        Measured(-1.0),
    ],
)
def test_nothing_else_comes_before_all_have_measured(message: ToScheduler) -> None:
    job = measuring()
    aborted(job.handle(worker(0), message), type(message).__name__, ProtocolError)


def test_nobody_measures_twice_or_where_slices_have_a_size() -> None:
    job = measuring()
    job.handle(worker(0), Measured(1e6))
    aborted(job.handle(worker(0), Measured(1e6)), "Measured out of turn", ProtocolError)
    aborted(running().handle(worker(0), Measured(1e6)), "Measured out of turn", ProtocolError)


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_worker_that_leaves_while_others_measure_is_missed(leaves_first: bool) -> None:
    job = measuring()
    replies: Replies = []
    for message, rank in sorted([(0, 1), (1, 0)], reverse=not leaves_first):
        replies = job.handle(worker(rank), Measured(1e6) if message else Bye())
    aborted(replies, "worker 1", PeerLostError)


@pytest.mark.parametrize("other", [Ready(SLICE_SIZE + 1, False), Ready(SLICE_SIZE, True)])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_workers_with_different_settings_end_the_job(other: Ready, first: int, second: int) -> None:
    job = assembled()
    job.handle(worker(first), Ready(SLICE_SIZE, False))
    failure = aborted(job.handle(worker(second), other), "set p3kv.configure", ConfigError)
    assert "worker 0" in failure.reason
    assert "worker 1" in failure.reason


# Keys.


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    st.integers(1, 4),
    st.data(),
)
@settings(max_examples=60)
def test_a_key_has_one_number_and_place_whoever_declares_it_first(
    sizes: List[int], servers: int, data: st.DataObject
) -> None:
    job = running(workers=2, servers=servers)
    order = data.draw(st.permutations([(r, k) for r in range(2) for k in range(len(sizes))]))
    answers: Dict[int, List[KeyDeclared]] = {}
    loads = [0] * servers
    for rank, key in order:
        replies = job.handle(worker(rank), DeclareKey(key, (sizes[key],), "float32"))
        ((receiver, answer),) = replies
        assert receiver == worker(rank)
        assert isinstance(answer, KeyDeclared)
        if key not in answers:
            assert answer.runs == place(sizes[key], SLICE_SIZE, loads)
            loads = loads_with(loads, answer.runs)
        answers.setdefault(key, []).append(answer)
    assert all(len(both) == 2 and both[0] == both[1] for both in answers.values())
    assert sorted(both[0].key_id for both in answers.values()) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (DeclareKey("w", (3, 2), "float32"), "(3, 2)"),
        (DeclareKey("w", (6,), "float32"), "(6,)"),
        (DeclareKey("w", (2, 3), "float64"), "float64"),
    ],
    ids=["shape", "rank", "dtype"],
)
def test_workers_that_disagree_on_a_key_are_both_named_and_the_job_ends(
    other: DeclareKey, word: str
) -> None:
    job = running()
    job.handle(worker(0), DeclareKey("w", (2, 3), "float32"))
    replies = job.handle(worker(1), other)
    assert isinstance(to(replies, worker(1))[0], KeyRefused)
    failure = aborted(replies, "workers disagree on key 'w'", KeyMismatchError)
    for text in ("worker 0", "worker 1", "(2, 3)", "float32", word):
        assert text in failure.reason
    assert set(of(replies, Abort)) == {worker(0), worker(1), server(0), server(1)}


def test_a_number_and_its_text_are_two_keys() -> None:
    job = running(workers=1)
    ids = []
    for key in (3, "3"):
        ((_, answer),) = job.handle(worker(0), DeclareKey(key, (2,), "float32"))
        assert isinstance(answer, KeyDeclared)
        ids.append(answer.key_id)
    assert ids[0] != ids[1]


def test_a_worker_that_declares_a_key_twice_is_refused() -> None:
    job = running()
    job.handle(worker(0), DeclareKey("w", (2,), "float32"))
    replies = job.handle(worker(0), DeclareKey("w", (2,), "float32"))
    assert isinstance(to(replies, worker(0))[0], KeyRefused)
    aborted(replies, "key 'w' was declared before by worker 0", KeyMismatchError)


# Barriers.


@given(st.lists(st.permutations([0, 1, 2]), min_size=1, max_size=4))
def test_a_barrier_opens_for_all_when_the_last_one_comes_again_and_again(
    orders: List[List[int]],
) -> None:
    job = running(workers=3)
    for order in orders:
        for rank in order[:-1]:
            assert job.handle(worker(rank), BarrierReached()) == []
        passed = of(job.handle(worker(order[-1]), BarrierReached()), BarrierPassed)
        assert set(passed) == {worker(0), worker(1), worker(2)}


@pytest.mark.parametrize("bye_first", [True, False], ids=["bye first", "barrier first"])
def test_a_barrier_that_one_has_left_for_ever_ends_the_job(bye_first: bool) -> None:
    job = running()
    events = [(worker(1), Bye()), (worker(0), BarrierReached())]
    replies: Replies = []
    for identity, message in events if bye_first else events[::-1]:
        assert replies == []
        replies = job.handle(identity, message)
    failure = aborted(replies, "ended while others still needed it", PeerLostError)
    assert (failure.role, failure.rank) == ("worker", 1)


# Out of turn.


@pytest.mark.parametrize("ready", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (server(0), Ready(SLICE_SIZE, False)),
        (server(0), DeclareKey("w", (2,), "float32")),
        (server(0), BarrierReached()),
        (worker(1), DeclareKey("w", (2,), "float32")),
        (worker(1), BarrierReached()),
        (worker(1), Ready(SLICE_SIZE, False)),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else type(value).__name__,
)
def test_what_comes_out_of_turn_ends_the_job_and_not_the_scheduler(
    identity: bytes, message: Any, ready: bool
) -> None:
    job = running() if ready else assembled()
    in_turn = identity == worker(1) and ready == (not isinstance(message, Ready))
    replies = job.handle(identity, message)
    if in_turn:
        assert job.failure is None
    else:
        failure = aborted(replies, f"sent {type(message).__name__} out of turn", ProtocolError)
        assert f"{failure.role} {failure.rank}".encode() == identity


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
