"""When a round ends: the states in which it can be, as a table, and all keys held against it."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import pytest

from p3kv.consistency import ASYNCHRONOUS
from p3kv.errors import ProtocolError
from p3kv.server.engine import SendVotes, ServerRows, ServerSlice
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, SliceSizes, Vote
from p3kv.wire.rows import NUMBER, Rows
from tests import engines
from tests.adding import Adding, AddingWhole
from tests.engines import ended, engine_of, push_host_sum, push_in_host_sum, push_rows

WORKERS, ROWS, COLUMNS = 2, 4, 3
SIZE = ROWS * COLUMNS


class AddingRows(Adding):
    """weight += rows."""

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        return False

    def update_rows(
        self, key: DeclaredKey, weight: np.ndarray, numbers: np.ndarray, rows: np.ndarray,
        step: int, ends_update: bool = True,
    ) -> None:  # fmt: skip
        weight[numbers] += rows


class Server:
    """A key of one record, or of two slices, and what happens to it."""

    def __init__(self, slices: int = 1, layout: str = "dense", own: bool = False) -> None:
        self.engine = engine_of(WORKERS)
        self.engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(SIZE // slices))
        declared = DeclaredKey(
            0, "w", (ROWS, COLUMNS), "float32", [(0, SIZE)], layout=layout,
            consistency=ASYNCHRONOUS if own else None,
        )  # fmt: skip
        key = self.engine.declare(declared)
        self.records = list(key.records(INITIAL_ROUND))
        assert len(self.records) == slices

    def push(self, rank: int, round_: int, record: int = 0) -> None:
        """Ones, but of the initial round nothing but zeros."""
        what, ones = self.records[record], np.full(SIZE, float(round_ > INITIAL_ROUND), np.float32)
        if isinstance(what, ServerRows):
            rows = Rows(np.arange(ROWS, dtype=NUMBER), ones.reshape(ROWS, COLUMNS))
            push_rows(what, rank, round_, 1, rows, round_)
        else:
            buffer = self.engine.state.pool.get(what.size_elems, np.dtype(np.float32))
            buffer.array[:] = ones[: what.size_elems]
            engines.push(what, rank, round_, buffer, step=round_)

    def value(self) -> float:
        """The first element of the first record, which all others equal."""
        what = self.records[0]
        if isinstance(what, ServerSlice):
            return float(what.known_value().array[0])
        assert isinstance(what, ServerRows)
        value = what.value
        return float(value.reshape(-1)[0])

    def ended(self) -> List[int]:
        """The rounds that end now, by all records in turn."""
        return [one.number for rec in self.records for one in ended(self.engine.end_rounds(rec))]


class Case(NamedTuple):
    """A way into a state, the rounds that end there, and what ends them at last."""

    begin: Callable[[], Server]
    happens: Callable[[Server], object]
    ended: Sequence[int]
    then: Callable[[Server], object]
    ended_then: Sequence[int]
    waits_for: Sequence[Tuple[int, List[int]]] = ()
    """In between, the rounds that wait for a worker's push, and the ranks."""


def with_optimizer(server: Server) -> Server:
    server.engine.set_optimizer(0, AddingRows())
    return server


def begun(slices: int = 1, layout: str = "dense", own: bool = False) -> Server:
    server = Server(slices, layout, own)
    for record in range(slices):
        server.push(0, INITIAL_ROUND, record)
    assert server.ended() == [INITIAL_ROUND] * slices
    return server


def pushes(*which: Tuple[int, ...]) -> Callable[[Server], object]:
    return lambda server: [server.push(*one) for one in which]


def pushed_in_host_sum(server: Server, ranks: Sequence[int] = range(WORKERS)) -> None:
    for rank in ranks:
        push_in_host_sum(server.records[0], rank, 1, 1)


def host_sum(server: Server, workers: int = WORKERS) -> None:
    buffer = server.engine.state.pool.get(SIZE, np.dtype(np.float32))
    buffer.array[:] = workers
    push_host_sum(server.records[0], 1, 1, buffer, workers)


def left_with_what_it_was_to_sum(server: Server) -> None:
    pushes((0, 1), (1, 1))(server)
    assert server.ended() == [1]
    push_in_host_sum(server.records[0], 1, 2, 2)
    server.engine.leave(0)


def clipped(server: Server) -> None:
    server.engine.begin_clipped(1)
    pushes((0, 1), (1, 1))(server)


def scaled(server: Server) -> None:
    assert [one.step for one in server.engine.end_pushes(1, SIZE)] == [1]
    held = server.engine.state.clipped.scaled(1, 0.5)
    assert [one.record for one in held] == server.records


def dropped(server: Server) -> None:
    size = SIZE if len(server.records) == 1 else SIZE * len(server.records)
    assert [one.step for one in server.engine.end_pushes(1, SIZE)] == [1], size
    held = server.engine.state.clipped.scaled(1, 1.0, is_dropped=True)
    assert {one.record for one in held} == {*server.records}


def whole(server: Server) -> Server:
    server.engine.set_optimizer(0, AddingWhole())
    return server


ALIKE = ("dense", "touched_rows")
CASES = {
    **{
        f"{name}, {layout}": case
        for layout in ALIKE
        for name, case in {
            "no initial value": Case(
                lambda layout=layout: Server(layout=layout), pushes((0, 1), (1, 1)), [],
                pushes((0, INITIAL_ROUND)), [INITIAL_ROUND, 1],
            ),
            "a worker is missing": Case(
                lambda layout=layout: begun(layout=layout), pushes((1, 1)), [],
                pushes((0, 1)), [1], [(1, [0])],
            ),
            "the round before is open": Case(
                lambda layout=layout: begun(layout=layout), pushes((1, 1), (1, 2), (0, 1)), [1],
                pushes((0, 2)), [2], [(2, [0])],
            ),
            "a worker has left": Case(
                lambda layout=layout: begun(layout=layout),
                lambda server: [pushes((0, 1), (1, 1), (0, 2))(server), server.ended()], [],
                lambda server: server.engine.leave(1), [2], [(2, [1])],
            ),
            "worker 0 has left before it pushed": Case(
                lambda layout=layout: begun(layout=layout),
                lambda server: [server.engine.leave(0), pushes((1, 1))(server)], [],
                lambda server: None, [], [(1, [0])],
            ),
            "own: no optimizer": Case(
                lambda layout=layout: begun(layout=layout, own=True), pushes((1, 1)), [],
                with_optimizer, [1], [(1, [0])],
            ),
            "own: no initial value": Case(
                lambda layout=layout: with_optimizer(Server(layout=layout, own=True)),
                pushes((1, 1), (1, 2)), [],
                pushes((0, INITIAL_ROUND)), [INITIAL_ROUND, 1, 2],
                [(INITIAL_ROUND, [0]), (INITIAL_ROUND, [0])],
            ),
            "own: the round before has not come": Case(
                lambda layout=layout: with_optimizer(begun(layout=layout, own=True)),
                pushes((1, 2), (0, 1)), [1],
                pushes((1, 1)), [1, 2],
            ),
        }.items()
    },
    "a host's sum has not come": Case(begun, pushed_in_host_sum, [], host_sum, [1]),
    "a worker of the host has its own slice in another sum": Case(
        begun, lambda server: [pushed_in_host_sum(server), host_sum(server, 1)], [],
        lambda server: host_sum(server, 1), [1],
    ),
    "the worker has left that was to send the host's sum": Case(
        begun, left_with_what_it_was_to_sum, [],
        lambda server: push_host_sum(server.records[0], 1, 2, None, 1), [2],
    ),
    **{
        f"the norm is not known, {layout}": Case(
            lambda layout=layout: with_optimizer(begun(layout=layout)), clipped, [], scaled, [1]
        )
        for layout in ALIKE
    },
    "a step is clipped, but not this store, which has no optimizer": Case(
        begun, clipped, [1], pushes((0, 2), (1, 2)), [2]
    ),
    "the tensor's other slice is not complete": Case(
        lambda: whole(begun(2)), pushes((0, 1), (1, 1), (0, 1, 1)), [], pushes((1, 1, 1)), [1, 1],
        [(1, [1])],
    ),
    "own: the tensor's other slice has not come": Case(
        lambda: whole(begun(2, own=True)), pushes((1, 1), (0, 1)), [], pushes((0, 1, 1)), [1, 1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_round_ends_when_nothing_holds_it_back_any_more(name: str) -> None:
    case = CASES[name]
    server = case.begin()
    case.happens(server)
    assert server.ended() == list(case.ended)
    waits = [wait for one in server.records for wait in one.rounds.waits() if wait.missing]
    assert [(wait.round, wait.missing) for wait in waits] == list(case.waits_for)
    case.then(server)
    assert server.ended() == list(case.ended_then)
    assert server.ended() == [], "each round ends once"


def test_a_sum_of_more_workers_than_have_said_so_is_refused() -> None:
    server = begun()
    pushed_in_host_sum(server)
    host_sum(server, WORKERS + 1)
    with pytest.raises(ProtocolError, match=r"sums of key 'w', slice 0 in round 1 have 1 slices"):
        server.ended()


def test_a_sum_of_nobody_or_of_others_only_is_refused() -> None:
    server = begun()
    pushed_in_host_sum(server, [0])
    for sender, workers in ((0, 0), (1, 1)):
        with pytest.raises(ProtocolError, match=f"worker {sender} has announced no sum"):
            push_host_sum(server.records[0], sender, 1, None, workers)


@pytest.mark.parametrize("kind", ["dense", "touched_rows", "whole"])
def test_a_dropped_step_changes_nothing_and_the_next_one_does(kind: str) -> None:
    """Its gradients may be nan. Those who lack one are told that others had one."""
    slices = 2 if kind == "whole" else 1
    server = begun(slices, "dense" if kind == "whole" else kind)
    server = whole(server) if kind == "whole" else with_optimizer(server)
    server.engine.begin_clipped(1)
    every = range(len(server.records))
    pushes(*((rank, 1, record) for record in every for rank in range(WORKERS)))(server)
    assert server.ended() == []
    dropped(server)
    ends = [one for rec in server.records for one in ended(server.engine.end_rounds(rec))]
    assert [(one.number, one.changed) for one in ends] == [(1, True)] * slices
    assert server.value() == 0.0 and not server.engine.state.clipped.steps
    pushes(*((rank, 2, record) for record in every for rank in range(WORKERS)))(server)
    assert server.ended() == [2] * slices
    assert server.value() == (2 * WORKERS if kind == "whole" else WORKERS)


def test_a_round_that_is_held_waits_for_who_has_not_voted() -> None:
    server = with_optimizer(begun())
    clipped(server)
    assert server.ended() == []
    assert [wait.missing for wait in server.records[0].rounds.waits()] == [[]]
    assert list(server.engine.vote(0, 1, 0, Vote(False))) == []
    assert [wait.missing for wait in server.records[0].rounds.waits()] == [[1]]
    assert list(server.engine.vote(0, 1, 1, Vote(False))) == [SendVotes(0, 1, False)]
    assert [wait.missing for wait in server.records[0].rounds.waits()] == [[]]


def test_votes_are_told_when_all_have_voted() -> None:
    engine = engine_of(WORKERS)
    yes, no = Vote(True), Vote(False)
    for number, votes in ((1, (no, no)), (2, (yes, no)), (3, (no, yes))):
        assert list(engine.vote(0, number, 1, votes[1])) == []
        assert list(engine.vote(5, number, 1, yes)) == [], "another store's"
        with pytest.raises(
            ProtocolError, match=f"worker 1 voted twice on the clipped step {number}"
        ):
            list(engine.vote(0, number, 1, no))
        assert list(engine.vote(0, number, 0, votes[0])) == [SendVotes(0, number, yes in votes)]
    assert list(engine.vote(0, 4, 0, Vote(False, 0.25))) == []
    blame, _ = engine.vote(0, 4, 1, Vote(False, 0.5))
    assert (blame.rank, blame.reason) == (1, "it unscales gradients by 0.5, and worker 0 by 0.25")


@pytest.mark.parametrize("layout", ALIKE)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("rank", "round_", "why"),
    [
        (1, INITIAL_ROUND, "worker 1 sent an initial value of key 'w'"),
        (0, INITIAL_ROUND, "worker 0 pushed key 'w'.* twice in round 0"),
        (1, 1, "worker 1 pushed key 'w'.* twice in round 1"),
        (1, 2, "worker 1 pushed key 'w'.* twice in round 2"),
    ],
)
def test_a_push_that_can_not_be_right_is_refused_and_changes_nothing(
    layout: str, own: bool, rank: int, round_: int, why: str
) -> None:
    """Of a round that has ended, and of one that is open."""
    server = with_optimizer(begun(layout=layout, own=own))
    pushes((0, 1), (1, 1), (1, 2))(server)
    server.ended()
    before = server.value()
    with pytest.raises(ProtocolError, match=why):
        server.push(rank, round_)
    assert server.ended() == [] and server.value() == before
