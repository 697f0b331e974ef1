"""What the processes of a job agree on: settings, sizes of slices, keys, barriers."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import own_layout  # noqa: F401  registers it
from p3kv.consistency import ASYNCHRONOUS
from p3kv.errors import ConfigError, KeyMismatchError, P3Error, PeerLostError, ProtocolError
from p3kv.scheduler.job import Job, Replies
from p3kv.slicing import BUCKET, balanced_runs, loads_with
from p3kv.wire.messages import (
    Abort,
    Agreed,
    BarrierPassed,
    BarrierReached,
    Bye,
    DeclaredKey,
    DeclareKey,
    FirstSliceSize,
    JobSettings,
    KeyRefused,
    Measured,
    Member,
    NewSliceSizes,
    Ready,
    SliceSizes,
    ToScheduler,
)
from tests.scheduled import SLICE_SIZE, aborted, assembled, of, running, server, to, worker

# Agreeing on settings.


def test_settings_hold_when_all_workers_have_them() -> None:
    job = assembled()
    assert job.handle(worker(1), Ready(JobSettings(SLICE_SIZE, True))) == []
    replies = job.handle(worker(0), Ready(JobSettings(SLICE_SIZE, True)))
    assert of(replies, Agreed) == {worker(0): Agreed(), worker(1): Agreed()}


def measuring(workers: int = 2) -> Job:
    job = assembled(workers)
    for rank in range(workers):
        job.handle(worker(rank), Ready(JobSettings()))
    return job


def test_the_slowest_worker_decides_how_large_slices_are() -> None:
    job = measuring()
    assert job.handle(worker(1), Measured(1e9)) == []
    replies = job.handle(worker(0), Measured(105e6))
    assert of(replies, FirstSliceSize) == {
        worker(rank): FirstSliceSize(50_000) for rank in range(2)
    }
    ((_, answer),) = job.handle(worker(0), DeclareKey("w", (120_000,), "float32"))
    assert answer.runs == [(0, 60_000), (1, 60_000)]
    ((_, answer),) = job.handle(worker(0), DeclareKey("v", (120_001,), "float32"))
    assert answer.runs == [(0, 60_001), (1, 60_000)]
    ((_, answer),) = job.handle(worker(0), DeclareKey("u", (1,), "float32"))
    assert answer.runs == [(1, 1)]


def test_slices_follow_the_slowest_worker_when_the_network_changes_much() -> None:
    job = measuring()
    for rank, rate in ((0, 180e6), (1, 105e6)):
        job.handle(worker(rank), Measured(rate))
    assert job.handle(worker(0), Measured(900e6)) == []  # the other one is as slow as before
    assert job.handle(worker(1), Measured(70e6)) == []
    assert job.handle(worker(1), Measured(195e6)) == []  # it may be less
    assert job.handle(worker(1), Measured(525e6)) == [
        (worker(0), NewSliceSizes(SliceSizes(200_000)))
    ]
    assert job.handle(worker(1), Measured(900e6)) == []  # twice the size: not worth it
    assert job.handle(worker(1), Measured(105e6)) == []  # it may be more
    assert job.handle(worker(0), Measured(1e6)) == [(worker(0), NewSliceSizes(SliceSizes(3_125)))]


def waiting(job: Job, waits: Dict[int, float], rate: float = 45e6) -> Dict[bytes, NewSliceSizes]:
    """What the scheduler says when workers report these parts of steps as waiting."""
    replies = [
        reply
        for rank, share in waits.items()
        for reply in job.handle(worker(rank), Measured(rate, waiting=share))
    ]
    return of(replies, NewSliceSizes)


def test_slices_are_large_while_all_workers_wait_much_for_the_network() -> None:
    job = measuring()
    for rank in range(2):
        job.handle(worker(rank), Measured(45e6))
    job.handle(worker(0), DeclareKey("w", (20_000_000,), "float32"))
    # A worker may know how long it waits, and no rate other than before.
    assert waiting(job, {0: 0.6}, rate=0.0) == {}
    assert waiting(job, {0: 0.6, 1: 0.2}) == {}  # worker 1 is what worker 0 waits for
    assert waiting(job, {1: 0.5}) == {worker(0): NewSliceSizes(SliceSizes(156_250, 156_250))}
    assert waiting(job, {0: 0.2, 1: 0.15}) == {}  # about as before
    assert waiting(job, {1: 0.05}) == {worker(0): NewSliceSizes(SliceSizes(25_000))}


def test_rows_and_small_models_do_not_make_slices_large() -> None:
    job = measuring()
    for rank in range(2):
        job.handle(worker(rank), Measured(45e6))
    job.handle(worker(0), DeclareKey("w", (3_000_000,), "float32"))
    job.handle(worker(0), DeclareKey("v", (10**6, 512), "float32", layout="touched_rows"))
    assert waiting(job, {0: 0.9, 1: 0.9}) == {}


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
        Measured(1.0, (1.0, -1.0)),
        Measured(1.0, (1.0, float("nan"))),
        Measured(1.0, (1.0,)),
        Measured(1.0, waiting=1.1),
        Measured(1.0, waiting=float("nan")),
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


@pytest.mark.parametrize(
    ("other", "theirs", "ours"),
    [
        (JobSettings(SLICE_SIZE + 1), "slice_size=101", "slice_size=100"),
        (
            JobSettings(SLICE_SIZE, True, placement="round_robin"),
            "deterministic=True, placement='round_robin'",
            "deterministic=False, placement='by_link'",
        ),
    ],
    ids=["one", "two"],
)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_workers_with_different_settings_end_the_job_and_learn_what_differs(
    other: JobSettings, theirs: str, ours: str, first: int, second: int
) -> None:
    job = assembled()
    job.handle(worker(first), Ready(JobSettings(SLICE_SIZE)))
    failure = aborted(job.handle(worker(second), Ready(other)), "Set p3kv.configure", ConfigError)
    one, another = (f"(10.0.0.7, process {100 + rank})" for rank in (second, first))
    assert failure.reason == f"it {one} has {theirs}, worker {first} {another} has {ours}"
    assert failure.where == f"worker {second}"


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
    answers: Dict[int, List[DeclaredKey]] = {}
    loads = [0] * servers
    for rank, key in order:
        replies = job.handle(worker(rank), DeclareKey(key, (sizes[key],), "float32"))
        ((receiver, answer),) = replies
        assert receiver == worker(rank)
        assert isinstance(answer, DeclaredKey)
        if key not in answers:
            assert answer.runs == balanced_runs(sizes[key], SLICE_SIZE, loads)
            assert (answer.key, answer.shape, answer.dtype) == (key, (sizes[key],), "float32")
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
        (DeclareKey("w", (2, 3), "float32", layout="rows"), "(layout rows)"),
    ],
    ids=["shape", "rank", "dtype", "layout"],
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


def bucket(*members: Member) -> DeclareKey:
    elems = sum(member.size_elems for member in members)
    return DeclareKey(0, (elems,), "float32", "some", layout=BUCKET, members=list(members))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ([(3,), (4,), (5,)], "worker 0 has no 'c' of shape (5,) (key 2)"),
        (
            [(3,), (2, 2)],
            "worker 0 has 'b' of shape (4,) (key 1), and worker 1 has 'b' of shape (2, 2) (key 1)",
        ),
    ],
)
def test_workers_that_disagree_on_a_tensor_of_a_bucket_read_which(
    other: List[Tuple[int, ...]], says: str
) -> None:
    job = running()
    ours, theirs = (
        bucket(*(Member(at, shape, "abc"[at]) for at, shape in enumerate(shapes)))
        for shapes in ([(3,), (4,)], other)
    )
    job.handle(worker(0), ours)
    failure = aborted(
        job.handle(worker(1), theirs),
        f"workers disagree on the model: {says}",
        KeyMismatchError,
    )
    assert "build the same model" in failure.words


def test_a_bucket_is_on_one_server_whatever_the_size_of_slices() -> None:
    job = running()
    members = [Member(at, (SLICE_SIZE,), "abc"[at]) for at in range(3)]
    (answer,) = to(job.handle(worker(0), bucket(*members)), worker(0))
    assert isinstance(answer, DeclaredKey)
    assert [elems for _, elems in answer.runs] == [3 * SLICE_SIZE]
    assert answer.members == members


def test_workers_that_disagree_on_a_store_s_rule_are_both_named_and_the_job_ends() -> None:
    job = running()
    job.handle(worker(0), DeclareKey("w", (2, 3), "float32"))
    replies = job.handle(worker(1), DeclareKey("w", (2, 3), "float32", consistency=ASYNCHRONOUS))
    failure = aborted(
        replies,
        "workers disagree on the consistency of key 'w': worker 0 has the job's, worker 1 has "
        "'asynchronous'",
        KeyMismatchError,
    )
    assert "choose the same consistency" in failure.words


def test_a_key_keeps_its_layout_and_its_rows_whole() -> None:
    job = running()
    for rank in range(2):
        ((_, answer),) = job.handle(
            worker(rank), DeclareKey("w", (9, 30), "float32", f"embedding{rank}", "rows")
        )
        assert answer == DeclaredKey(
            0, "w", (9, 30), "float32", [(0, 150), (1, 120)], "embedding0", "rows"
        )


def test_an_unknown_layout_ends_the_job_and_is_told_with_those_that_there_are() -> None:
    job = running()
    replies = job.handle(worker(1), DeclareKey("w", (2, 3), "float32", layout="columns"))
    failure = aborted(replies, "no layout 'columns', only bucket, dense", ConfigError)
    assert (failure.role, failure.rank) == ("worker", 1)
    assert "P3KV_PLUGINS, in the environment of every process" in failure.words


def test_a_number_and_its_text_are_two_keys() -> None:
    job = running(workers=1)
    ids = []
    for key in (3, "3"):
        ((_, answer),) = job.handle(worker(0), DeclareKey(key, (2,), "float32"))
        assert isinstance(answer, DeclaredKey)
        ids.append(answer.key_id)
    assert ids[0] != ids[1]


def test_stores_have_keys_of_their_own() -> None:
    job = running(workers=1)
    ids = []
    for store, shape in enumerate([(2,), (3, 4)]):
        declared = DeclareKey(0, shape, "float32", store=store)
        ((_, answer),) = job.handle(worker(0), declared)
        assert isinstance(answer, DeclaredKey)
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


def test_workers_that_are_at_a_barrier_for_different_purposes_all_learn_which() -> None:
    job = running(workers=3)
    assert job.handle(worker(2), BarrierReached("to load one file")) == []
    replies = job.handle(worker(1), BarrierReached("to load another"))
    failure = aborted(replies, "waits to load another, and worker 2", P3Error)
    assert "waits to load one file" in failure.reason


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


@given(st.permutations([0, 1, 2]))
def test_numbers_are_summed_in_the_order_of_ranks_in_whatever_order_they_come(
    order: List[int],
) -> None:
    job = running(workers=3)
    numbers = [0.1, 1e17, -1e17]  # 0.1 + 1e17 loses it, and 1e17 - 1e17 + 0.1 does not
    replies: Replies = []
    for rank in order:
        replies = job.handle(worker(rank), BarrierReached("to sum", numbers=(numbers[rank],)))
    passed = of(replies, BarrierPassed)
    assert [passed[worker(rank)].totals for rank in range(3)] == [(0.0,)] * 3
    for rank in order:
        replies = job.handle(worker(rank), BarrierReached())
    assert of(replies, BarrierPassed)[worker(0)].totals == ()


# Out of turn.


@pytest.mark.parametrize("ready", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (server(0), Ready(JobSettings(SLICE_SIZE))),
        (server(0), DeclareKey("w", (2,), "float32")),
        (server(0), BarrierReached()),
        (worker(1), DeclareKey("w", (2,), "float32")),
        (worker(1), BarrierReached()),
        (worker(1), Ready(JobSettings(SLICE_SIZE))),
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
