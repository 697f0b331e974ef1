"""What servers keep of the last round, mean gradients and the states before it: which, until when,
and in which memory."""

from __future__ import annotations

from typing import Dict, List, Optional
from weakref import ref

import numpy as np
import pytest

from p3kv.errors import ProtocolError
from p3kv.server.engine import ServerSlice
from p3kv.server.optimizer import State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, Member, SliceSizes
from tests import engines
from tests.adding import Adding
from tests.engines import ended, engine_of

WORKERS, SIZE, ROUNDS = 2, 12, 6
FLOAT = np.dtype(np.float32)


class AddingMeans(Adding):
    """weight += mean, which it leaves in the memory of the sum."""

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray,
        step: Optional[int],
    ) -> None:  # fmt: skip
        assert self.weight is not None
        total /= self.weight
        weight += total


class Summing(AddingMeans):
    """Remembers the sum of all means of a slice, and how many there were."""

    def __init__(self) -> None:
        self._states: Dict[int, State] = {}

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray,
        step: Optional[int],
    ) -> None:  # fmt: skip
        super().update(key, index, weight, total, step)
        before = self._states.get(index)
        if before is None:
            self._states[index] = State({"sum": total.copy()}, {"count": 1})
        else:
            before.elements["sum"] += total
            count = before.numbers["count"] + 1
            self._states[index] = State(before.elements, {"count": count})

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:  # type: ignore[override]
        return self._states.pop(index, None)

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        elements = {name: array.copy() for name, array in state.elements.items()}
        self._states[index] = State(elements, state.numbers)


def tensor(*seed: int) -> np.ndarray:
    return np.random.RandomState([*seed]).randn(SIZE).astype(np.float32)


def mean(round_: int) -> np.ndarray:
    return (tensor(0, round_) + tensor(1, round_)) / FLOAT.type(WORKERS)


class Server:
    """A key on one server."""

    def __init__(self, keeps: bool = True, slice_size: int = 4, members: int = 0) -> None:
        self.engine = engine_of(WORKERS)
        self.optimizer = Summing()
        self.engine.set_optimizer(0, self.optimizer)
        self.engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(slice_size))
        part = (SIZE // members,) if members else ()
        declared = DeclaredKey(
            0, "w", (SIZE,), "float32", [(0, SIZE)], layout="bucket" if members else "dense",
            members=[Member(at, part) for at in range(members)], keeps_means=keeps,
        )  # fmt: skip
        self.key = self.engine.declare(declared)
        self.push(0, INITIAL_ROUND)

    def slices(self, round_: int) -> List[ServerSlice]:
        found = self.key.records(round_)
        return [one for one in found if isinstance(one, ServerSlice)]

    def push(self, rank: int, round_: int, gives: bool = True, lacking: int = 0) -> None:
        for slice_ in [*self.slices(round_)]:
            gradient = None
            if gives:
                gradient = self.engine.state.pool.get(slice_.length, FLOAT)
                gradient.array[:] = tensor(rank, round_)[slice_.offset :][: slice_.length]
            engines.push(slice_, rank, round_, gradient, step=round_, lacking=lacking)
            for _ in ended(self.engine.end_rounds(slice_)):
                pass

    def both_push(self, round_: int) -> None:
        for rank in range(WORKERS):
            self.push(rank, round_)

    def state_before(self, round_: int, member: int = 0) -> Optional[State]:
        return self.key.copied_state(self.optimizer, False, member, round_)

    def buffers(self) -> int:
        """How many there are that nobody uses, or that keep a mean."""
        free = sum(map(len, self.engine.state.pool._free.values()))
        return free + sum(one.kept is not None for one in self.slices(INITIAL_ROUND))


@pytest.mark.parametrize("slice_size", [4, SIZE])
def test_the_last_round_s_mean_is_kept_until_the_next_ends(slice_size: int) -> None:
    server = Server(slice_size=slice_size)
    for round_ in range(1, ROUNDS):
        server.push(1, round_)
        assert not server.key.has_mean(round_)
        if round_ > 1:
            np.testing.assert_array_equal(server.key.copied_mean(round_ - 1)[0], mean(round_ - 1))
        server.push(0, round_)
        assert server.key.has_mean(round_)
        np.testing.assert_array_equal(server.key.copied_mean(round_)[0], mean(round_))
        with pytest.raises(ProtocolError, match="not kept"):
            server.key.has_mean(round_ - 1)


def test_buffers_are_swapped_and_none_is_kept_where_nobody_asks() -> None:
    keeps, other = Server(), Server(keeps=False)
    counts = []
    for server in (keeps, other):
        server.both_push(1)
        counts.append(server.buffers())
        for round_ in range(2, ROUNDS):
            server.both_push(round_)
            assert server.buffers() <= counts[-1] + len(server.slices(1)), "no more each round"
    assert all(slice_.kept is None for slice_ in other.slices(1))
    with pytest.raises(ProtocolError, match="keeps none"):
        other.key.has_mean(1)


def test_memory_is_freed_with_the_store() -> None:
    server = Server()
    server.both_push(1)
    gone = []
    for slice_ in server.slices(1):
        assert slice_.kept is not None and slice_.kept.total is not None
        gone.append(ref(slice_.kept.total.array))
    server.engine.forget(0)
    assert not any(one() is not None for one in gone)


@pytest.mark.parametrize("members", [0, 3])
def test_means_stay_when_slices_change_their_size(members: int) -> None:
    server = Server(slice_size=SIZE if members else 4, members=members)
    server.both_push(1)
    server.engine.set_slice_sizes(3, SliceSizes(SIZE if members else 5))
    server.both_push(2)
    np.testing.assert_array_equal(server.key.copied_mean(2)[0], mean(2))
    server.both_push(3)
    np.testing.assert_array_equal(server.key.copied_mean(3)[0], mean(3))


def test_rounds_without_gradients_have_none() -> None:
    server = Server()
    server.both_push(1)
    for rank in range(WORKERS):
        server.push(rank, 2, gives=False)
    assert server.key.has_mean(2) and server.key.copied_mean(2)[0] is None
    bucket = Server(slice_size=SIZE, members=3)
    bucket.push(0, 1, lacking=0b110)
    bucket.push(1, 1, lacking=0b101)
    assert bucket.key.copied_mean(1)[1] == 0b100


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_held_round_s_mean_is_there_before_it_ends_and_is_never_scaled(
    scale: float, is_dropped: bool
) -> None:
    server = Server()
    for round_ in range(1, ROUNDS):
        server.engine.begin_clipped(round_)
        server.push(0, round_)
        assert not server.key.has_mean(round_)
        server.push(1, round_)
        assert server.key.has_mean(round_)
        np.testing.assert_array_equal(server.key.copied_mean(round_)[0], mean(round_))
        list(server.engine.end_pushes(round_, SIZE))
        for held in server.engine.state.clipped.scaled(round_, scale, is_dropped):
            assert len([*ended(server.engine.end_rounds(held.record))]) == 1
        np.testing.assert_array_equal(server.key.copied_mean(round_)[0], mean(round_))
    value = np.concatenate([slice_.known_value().array for slice_ in server.slices(1)])
    expected = tensor(0, INITIAL_ROUND)
    for round_ in range(1, ROUNDS if not is_dropped else 1):
        expected = expected + mean(round_) * FLOAT.type(scale)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def sum_before(round_: int) -> np.ndarray:
    found = mean(1)
    for before in range(2, round_):
        found = found + mean(before)
    return found


@pytest.mark.parametrize("slice_size", [4, SIZE])
def test_the_states_before_the_last_round_are_kept(slice_size: int) -> None:
    server = Server(slice_size=slice_size)
    server.both_push(1)
    assert server.state_before(1) is None
    for round_ in range(2, ROUNDS):
        server.push(1, round_)
        server.push(0, round_)
        before = server.state_before(round_)
        assert before is not None and before.numbers == {"count": round_ - 1}
        np.testing.assert_array_equal(before.elements["sum"], sum_before(round_))
        now = server.key.copied_state(server.optimizer, False)
        assert now is not None and now.numbers == {"count": round_}
    for rank in range(WORKERS):
        server.push(rank, ROUNDS, gives=False)
    unchanged = server.state_before(ROUNDS)
    assert unchanged is not None and unchanged.numbers == {"count": ROUNDS - 1}
    with pytest.raises(ProtocolError, match="before a round"):
        Server(keeps=False).state_before(1)


def test_the_states_before_stay_when_slices_change_their_size() -> None:
    server = Server(slice_size=4)
    for round_ in (1, 2):
        server.both_push(round_)
    server.engine.set_slice_sizes(4, SliceSizes(5))
    for round_ in (3, 4, 5):
        server.both_push(round_)
        before = server.state_before(round_)
        assert before is not None and before.numbers == {"count": round_ - 1}
        np.testing.assert_array_equal(before.elements["sum"], sum_before(round_))


def test_the_states_before_of_a_bucket_are_each_tensor_s() -> None:
    """Together at first; then one tensor lacks a gradient, and has its own state from then on."""
    server = Server(slice_size=SIZE, members=3)
    for round_ in (1, 2):
        server.both_push(round_)
    for rank in range(WORKERS):
        server.push(rank, 3, lacking=0b010)
    for member in (1, 2, 3):
        before = server.state_before(3, member)
        part = slice(4 * (member - 1), 4 * member)
        assert before is not None and before.numbers == {"count": 2}
        np.testing.assert_array_equal(before.elements["sum"], sum_before(3)[part])
    server.both_push(4)
    counts = []
    for member in (1, 2, 3):
        before = server.state_before(4, member)
        assert before is not None
        counts.append(before.numbers["count"])
    assert counts == [3, 2, 3]
