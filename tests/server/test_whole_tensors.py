"""Optimizers of whole tensors: one update a round, whatever the slices and the order of pushes."""

from __future__ import annotations

from functools import cached_property
from random import Random
from typing import Dict, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.consistency import BulkSynchronous
from p3kv.errors import KeyMismatchError, ProtocolError
from p3kv.server.engine import ServerKey
from p3kv.server.engine.state import Buffer
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.slicing import PLACEMENTS, Run, Slice, cut, make_layout
from p3kv.slicing.placement import checked
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, DeclareKey, KeyRefused, SliceSizes
from tests import engines
from tests.engines import engine_of, missing, with_values
from tests.scheduled import running, to, worker

SHAPE = (13, 9)
SIZE = 117
ROUNDS = 6


class RowMomentum(Optimizer):
    """Needs rows and the norm of all elements, and counts steps."""

    whole_tensors = True

    def __init__(self) -> None:
        self.rows: Dict[int, np.ndarray] = {}
        self.steps: List[int] = []

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("whoever sums does not configure")

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        assert index == WHOLE
        self.steps.append(step)
        rows = self.rows.get(key.key_id, np.zeros((SHAPE[0], 1), np.float32))
        updated, self.rows[key.key_id] = row_momentum(
            weight.reshape(key.shape), total.reshape(key.shape), rows
        )
        weight[:] = updated.reshape(-1)

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        assert index != WHOLE, "nobody re-slices a whole tensor's state"
        return None

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        raise AssertionError("slices have no states")


def row_momentum(
    weight: np.ndarray, total: np.ndarray, rows: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    rows = rows / 2 + total.mean(axis=1, keepdims=True)
    return weight - total / np.linalg.norm(total) - rows, rows


def tensor(*seed: int) -> np.ndarray:
    """Whole numbers, so that no sum is rounded, in any order."""
    return np.random.RandomState(list(seed)).randint(-50, 51, SIZE).astype(np.float32)


def expected(workers: int) -> List[np.ndarray]:
    """The value after each round, from the joined tensors."""
    values, rows = [tensor(0).reshape(SHAPE)], np.zeros((SHAPE[0], 1), np.float32)
    for round_ in range(1, ROUNDS + 1):
        total = sum(tensor(rank, round_, 1) for rank in range(workers)).reshape(SHAPE)  # type: ignore[union-attr]
        value, rows = row_momentum(values[-1], total, rows)
        values.append(value)
    return values


class Server:
    """One server's part of one key, with values that stay in use for a while."""

    def __init__(self, workers: int, runs: List[Run], deterministic: bool = False) -> None:
        self.engine = engine_of(workers, deterministic=deterministic)
        self.sizes = self.engine._sizes
        self.pool = self.engine.state.pool
        self.optimizer = RowMomentum()
        self.engine.set_optimizer(0, self.optimizer)
        self._runs = runs
        self.values: Dict[int, np.ndarray] = {}
        self.in_use: List[Tuple[Buffer, np.ndarray]] = []

    @cached_property
    def key(self) -> ServerKey:
        """The key, declared when the slices' size is known."""
        declared = DeclaredKey(0, "w", SHAPE, "float32", self._runs)
        key = self.engine.declare(declared)
        assert isinstance(key, ServerKey)
        return key

    def slices(self, round_: int) -> Tuple[Slice, ...]:
        size = self.sizes.of(self.sizes.generation(round_)).slice_size
        return cut(self.key.declared.runs, size)

    def push(self, rank: int, round_: int, piece: Slice) -> None:
        values = tensor(0) if round_ == INITIAL_ROUND else tensor(rank, round_, 1)
        slice_ = self.key.slice_at(round_, piece.index, rank)
        gradient = self.pool.get(piece.length, np.dtype(np.float32))
        gradient.array[:] = values[piece.offset : piece.offset + piece.length]
        engines.push(slice_, rank, round_, gradient, step=round_)
        for result in with_values(self.engine.end_rounds(slice_)):
            piece = self.slices(result.round)[result.slice_.index]
            whole = self.values.setdefault(result.round, np.full(SIZE, np.nan, np.float32))
            part = whole[piece.offset : piece.offset + piece.length]
            assert np.isnan(part).all(), "two results of a round"
            part[:] = result.value.array
            result.value.begin_send()
            self.in_use.append((result.value, result.value.array.copy()))

    def end_sends(self, count: int) -> None:
        for buffer, before in self.in_use[:count]:
            np.testing.assert_array_equal(buffer.array, before)
            buffer.end_send()
        del self.in_use[:count]

    @property
    def ended(self) -> int:
        """The last round that has ended for all elements."""
        whole = [round_ for round_, value in self.values.items() if not np.isnan(value).any()]
        return max(whole, default=INITIAL_ROUND)


@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(12, SIZE + 1), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_values_are_those_of_the_joined_tensors(
    seed: int, workers: int, deterministic: bool, sizes: List[int]
) -> None:
    random = Random(seed)
    server = Server(workers, [(0, SIZE)], deterministic)
    changes = sorted(random.sample(range(1, ROUNDS), len(sizes) - 1))
    for from_round, size in zip([INITIAL_ROUND, *changes], sizes):
        server.sizes.set(from_round, SliceSizes(size))
    left = [(0, INITIAL_ROUND, piece) for piece in server.slices(INITIAL_ROUND)]
    for round_ in range(1, ROUNDS + 1):
        left += [(rank, round_, one) for rank in range(workers) for one in server.slices(round_)]
    while left:
        possible = [push for push in left if push[1] <= server.ended + BulkSynchronous.window]
        push = random.choice(possible)
        left.remove(push)
        server.push(*push)
        server.end_sends(random.choice([0, 0, 0, len(server.in_use)]))
    for round_, value in enumerate(expected(workers)):
        np.testing.assert_array_equal(server.values[round_], value.reshape(-1))
    assert server.optimizer.steps == list(range(1, ROUNDS + 1))


def test_a_round_ends_for_no_slice_before_it_is_complete_for_all() -> None:
    server = Server(2, [(0, SIZE)])
    server.sizes.set(INITIAL_ROUND, SliceSizes(50))
    first, second, third = server.slices(INITIAL_ROUND)
    for piece in (first, second, third):
        server.push(0, INITIAL_ROUND, piece)
        assert not np.isnan(server.values[INITIAL_ROUND]).all()
    for rank in (0, 1):
        for piece in (third, first):
            server.push(rank, 1, piece)
    server.push(0, 1, second)
    assert set(server.values) == {INITIAL_ROUND}
    assert [
        missing(server.key.slice_at(1, piece.index, rank))[1] for piece in (first, second, third)
    ] == [[], [1], []]
    server.push(1, 1, second)
    assert not np.isnan(server.values[1]).any()


def test_a_key_on_several_servers_is_not_updated_in_parts() -> None:
    server = Server(1, [(0, SIZE - 1), (1, 1)])
    server.sizes.set(INITIAL_ROUND, SliceSizes(SIZE))
    piece = server.slices(INITIAL_ROUND)[0]
    server.push(0, INITIAL_ROUND, piece)
    with pytest.raises(ProtocolError, match="key 'w' was declared for 2 servers"):
        server.push(0, 1, piece)


# Where they are placed.


@pytest.mark.parametrize("name", ["balanced", "round_robin", "whole_tensors"])
def test_a_key_that_must_be_whole_is_on_one_server(name: str) -> None:
    placement, loads = PLACEMENTS.find(name)(), [0, 0, 0]
    for size in (950, 900, 0, 30, 420, 400, 1000):
        layout = make_layout("dense", (size,))
        placed = placement.place(layout, max(1, size), loads, [""] * 3)
        runs = checked(placed, layout, 3, whole=True)
        assert len(runs) == bool(size)
        for server, length in runs:
            if name != "round_robin":
                assert loads[server] == min(loads)
            loads[server] += length


def declared(key: str, whole: bool, size: int = 1000) -> DeclareKey:
    return DeclareKey(key, (size,), "float32", whole=whole)


def test_keys_that_must_be_whole_and_others_share_the_servers_evenly() -> None:
    job = running()
    found = {}
    for key, whole in (("a", True), ("b", False), ("c", True), ("d", True)):
        ((_, answer),) = job.handle(worker(0), declared(key, whole))
        assert isinstance(answer, DeclaredKey)
        found[key] = answer.runs
    assert found == {"a": [(0, 1000)], "b": [(1, 1000)], "c": [(0, 1000)], "d": [(1, 1000)]}


@pytest.mark.parametrize("needs", [0, 1])
def test_workers_of_which_one_has_no_such_optimizer_are_both_named(needs: int) -> None:
    job = running()
    job.handle(worker(0), declared("w", needs == 0))
    replies = job.handle(worker(1), declared("w", needs == 1))
    (refused, _) = to(replies, worker(1))
    assert isinstance(refused, KeyRefused)
    assert f"worker {needs} has an optimizer that needs the whole tensor" in refused.reason
    assert f"worker {1 - needs} has none" in refused.reason
    assert "must use the same optimizer, from the beginning" in refused.reason
    assert job.failure is not None
    assert job.failure.error == KeyMismatchError.__name__


def test_a_placement_that_spreads_what_must_be_whole_is_named() -> None:
    layout = make_layout("dense", (6,))
    with pytest.raises(ValueError, match="must be one run, because the optimizer needs the whole"):
        checked([(0, 3), (1, 3)], layout, 2, whole=True)
    assert checked([(0, 3), (1, 3)], layout, 2) == [(0, 3), (1, 3)]
