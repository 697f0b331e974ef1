"""Sums by rank and round, whatever the order of arrival, and the buffers they live in."""

from __future__ import annotations

import math
from typing import Dict, List, Set, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import ProtocolError
from p3kv.server.engine.state import Buffer, BufferPool
from p3kv.server.optimizer import Optimizer, State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey
from tests import engines
from tests.engines import Result, engine_of, missing, one_slice, with_values

LENGTH = 40
INITIAL = np.full(LENGTH, 0.125, np.float32)


class CountingPool(BufferPool):
    """Knows every buffer it has made and which of them are back."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Set[Buffer] = set()
        self.back: List[Buffer] = []

    def get(self, length: int, dtype: np.dtype) -> Buffer:
        buffer = super().get(length, dtype)
        self.made.add(buffer)
        if buffer in self.back:
            self.back.remove(buffer)
        return buffer

    def put(self, buffer: Buffer) -> None:
        assert buffer not in self.back, "given back twice"
        self.back.append(buffer)
        super().put(buffer)

    @property
    def in_use(self) -> Set[Buffer]:
        return self.made.difference(self.back)


class Subtracting(Optimizer):
    """weight -= total; exact enough to check, and notes what it was called with."""

    def __init__(self) -> None:
        self.calls: List[Tuple[str, int, int]] = []

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("whoever sums does not configure")

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        self.calls.append((str(key.key), index, step))
        weight -= total

    def export(self, key: DeclaredKey, index: int) -> None:
        raise AssertionError("it has no states")

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        raise AssertionError("it has no states")


class Server:
    """An aggregator with one slice, as a server uses it."""

    def __init__(self, num_workers: int, deterministic: bool = False, initial: bool = True) -> None:
        self.pool = CountingPool()
        self.engine = engine_of(num_workers, pool=self.pool, deterministic=deterministic)
        declared = DeclaredKey(0, "w", (LENGTH,), "float32", [(0, LENGTH)])
        self.slice_ = one_slice(self.engine, declared)
        if initial:
            self.push(0, INITIAL_ROUND, INITIAL, wants=False)

    def push(
        self, rank: int, round: int, gradient: np.ndarray, wants: bool = True, priority: int = 0,
        step: int = 0, weight: float = 1.0,
    ) -> List[Result]:  # fmt: skip
        buffer = self.pool.get(LENGTH, np.dtype(np.float32))
        buffer.array[:] = gradient
        engines.push(self.slice_, rank, round, buffer, wants, priority, step, weight=weight)
        return list(with_values(self.engine.end_rounds(self.slice_)))

    @property
    def value(self) -> np.ndarray:
        assert self.slice_.value is not None
        return self.slice_.value.array


def gradient(rank: int, round: int) -> np.ndarray:
    """Random over many magnitudes, so that another order of the sum gives another sum."""
    generator = np.random.RandomState([rank, round])
    scale = 10.0 ** generator.uniform(-4, 4, LENGTH)
    return (generator.standard_normal(LENGTH) * scale).astype(np.float32)


def in_order(gradients: List[np.ndarray]) -> np.ndarray:
    total = gradients[0].copy()
    for one in gradients[1:]:
        total = total + one
    return total


@st.composite
def arrivals(draw: st.DrawFn) -> Tuple[int, List[Tuple[int, int]]]:
    """Some workers' pushes of some rounds: each worker's in order, otherwise in any."""
    num_workers = draw(st.integers(1, 5))
    num_rounds = draw(st.integers(1, 4))
    ranks = draw(st.permutations([rank for rank in range(num_workers) for _ in range(num_rounds)]))
    following = dict.fromkeys(range(num_workers), INITIAL_ROUND)
    pushes = []
    for rank in ranks:
        following[rank] += 1
        pushes.append((rank, following[rank]))
    return num_workers, pushes


@given(arrivals())
@settings(max_examples=200)
def test_a_round_is_the_sum_of_its_workers_in_order_of_arrival(
    job: Tuple[int, List[Tuple[int, int]]],
) -> None:
    num_workers, pushes = job
    server = Server(num_workers)
    arrived: Dict[int, List[int]] = {}
    ended = INITIAL_ROUND
    for rank, round_ in pushes:
        results = server.push(rank, round_, gradient(rank, round_))
        arrived.setdefault(round_, []).append(rank)
        if len(arrived[round_]) < num_workers:
            assert results == []
            continue
        assert [result.round for result in results] == [ended + 1]
        ended += 1
        expected = in_order([gradient(r, ended) for r in arrived[ended]])
        np.testing.assert_array_equal(results[0].value.array, expected)
        assert sorted(results[0].wanting) == list(range(num_workers))
    assert server.slice_.rounds.open == {}


@given(arrivals())
@settings(max_examples=200)
def test_deterministic_sums_go_in_rank_order_bit_for_bit(
    job: Tuple[int, List[Tuple[int, int]]],
) -> None:
    num_workers, pushes = job
    server = Server(num_workers, deterministic=True)
    for rank, round_ in pushes:
        for result in server.push(rank, round_, gradient(rank, round_)):
            expected = in_order([gradient(r, result.round) for r in range(num_workers)])
            np.testing.assert_array_equal(result.value.array, expected)


@given(arrivals(), st.booleans())
def test_pushes_before_the_initial_value_wait_for_it(
    job: Tuple[int, List[Tuple[int, int]]], deterministic: bool
) -> None:
    num_workers, pushes = job
    server = Server(num_workers, deterministic, initial=False)
    server.engine.set_optimizer(0, Subtracting())
    for rank, round_ in pushes:
        assert server.push(rank, round_, np.ones(LENGTH)) == []
    ended = server.push(0, INITIAL_ROUND, INITIAL, wants=False)
    last = max(round_ for _, round_ in pushes)
    assert [result.round for result in ended] == list(range(INITIAL_ROUND, last + 1))
    np.testing.assert_array_equal(server.value, INITIAL - num_workers * last)


def test_several_rounds_may_be_open_and_end_in_order() -> None:
    server = Server(2)
    for round_ in (1, 2, 3):
        assert server.push(0, round_, gradient(0, round_)) == []
    assert sorted(server.slice_.rounds.open) == [1, 2, 3]
    for round_ in (1, 2, 3):
        assert missing(server.slice_)[round_] == [1]
        results = server.push(1, round_, gradient(1, round_))
        assert [result.round for result in results] == [round_]
        np.testing.assert_array_equal(
            results[0].value.array, gradient(0, round_) + gradient(1, round_)
        )


def test_a_worker_is_one_even_if_it_pushes_often() -> None:
    """What corrupts sums where messages are counted: two pushes of one worker are no round."""
    server = Server(2)
    server.push(1, 1, gradient(1, 1))
    assert server.push(1, 2, gradient(1, 2)) == []
    results = server.push(0, 1, gradient(0, 1))
    assert [result.round for result in results] == [1]
    np.testing.assert_array_equal(results[0].value.array, gradient(1, 1) + gradient(0, 1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_push_that_comes_twice_is_refused_and_not_added(deterministic: bool) -> None:
    server = Server(2, deterministic)
    server.push(0, 1, gradient(0, 1))
    with pytest.raises(ProtocolError, match=r"worker 0 pushed key 'w', slice 0 twice in round 1"):
        server.push(0, 1, gradient(0, 1))
    server.push(1, 1, gradient(1, 1))
    np.testing.assert_array_equal(server.value, gradient(0, 1) + gradient(1, 1))


@given(st.permutations([0, 1, 2, 3]), st.booleans())
def test_sums_and_their_divisor_are_weighted_in_whatever_order_pushes_come(
    order: List[int], deterministic: bool
) -> None:
    weights = [0.1, 1.0, 1e9, 7.0]
    server, optimizer = Server(4, deterministic), Subtracting()
    server.engine.set_optimizer(0, optimizer)
    before = server.value.copy()
    for rank in order:
        server.push(rank, 1, gradient(rank, 1), weight=weights[rank])
    assert optimizer.weight == math.fsum(weights)
    summed = [0, 1, 2, 3] if deterministic else order
    weighted = [gradient(rank, 1) * np.float32(weights[rank]) for rank in summed]
    np.testing.assert_array_equal(server.value, before - in_order(weighted))
    for rank in order:
        server.push(rank, 2, gradient(rank, 2))
    assert optimizer.weight == 4


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 0.0])
def test_a_gradient_can_not_weigh_nothing_or_less(weight: float) -> None:
    server = Server(2)
    with pytest.raises(ProtocolError, match="it weighs key 'w', slice 0 by"):
        server.push(0, 1, gradient(0, 1), weight=weight)


@pytest.mark.parametrize("round_", [1, 2])
def test_a_push_after_its_round_is_refused(round_: int) -> None:
    server = Server(1)
    server.push(0, 1, gradient(0, 1))
    server.push(0, 2, gradient(0, 2))
    with pytest.raises(ProtocolError, match=f"twice in round {round_}"):
        server.push(0, round_, gradient(0, 3))
    np.testing.assert_array_equal(server.value, gradient(0, 2))


def test_only_rank_0_gives_an_initial_value_and_only_once() -> None:
    server = Server(2, initial=False)
    with pytest.raises(ProtocolError, match="worker 1 sent an initial value"):
        server.push(1, INITIAL_ROUND, INITIAL)
    server.push(0, INITIAL_ROUND, INITIAL)
    with pytest.raises(ProtocolError):
        server.push(0, INITIAL_ROUND, INITIAL)


def test_missing_ranks_are_known_by_name() -> None:
    server = Server(4, initial=False)
    server.push(2, 1, gradient(2, 1))
    assert server.slice_.rounds.waits()
    assert missing(server.slice_)[1] == [0, 1, 3]


def test_only_those_get_a_result_who_asked_for_it() -> None:
    server = Server(3)
    server.push(2, 1, gradient(2, 1), wants=True)
    server.push(0, 1, gradient(0, 1), wants=False)
    (result,) = server.push(1, 1, gradient(1, 1), wants=True)
    assert sorted(result.wanting) == [1, 2]


def test_the_optimizer_sees_the_sum_once_a_round_with_rank_0_s_step() -> None:
    server = Server(2)
    optimizer = Subtracting()
    server.engine.set_optimizer(0, optimizer)
    expected = INITIAL.copy()
    for round_, first in ((1, 0), (2, 1)):
        for rank in (first, 1 - first):
            # Worker 1 has counted other steps: it joined a key later, say.
            server.push(rank, round_, gradient(rank, round_), step=10 * round_ if rank == 0 else 99)
        expected -= in_order([gradient(first, round_), gradient(1 - first, round_)])
        np.testing.assert_array_equal(server.value, expected)
    assert optimizer.calls == [("w", 0, 10), ("w", 0, 20)]


def test_without_an_optimizer_the_value_is_the_last_sum_not_the_sum_of_all() -> None:
    server = Server(1)
    server.push(0, 1, gradient(0, 1))
    server.push(0, 2, gradient(0, 2))
    np.testing.assert_array_equal(server.value, gradient(0, 2))


@pytest.mark.parametrize("with_optimizer", [False, True], ids=["sum", "update"])
def test_a_value_that_is_still_being_sent_is_not_changed(with_optimizer: bool) -> None:
    server = Server(1)
    if with_optimizer:
        server.engine.set_optimizer(0, Subtracting())
    (first,) = server.push(0, 1, gradient(0, 1))
    sent = first.value.array.copy()
    first.value.begin_send()
    (second,) = server.push(0, 2, gradient(0, 2))
    assert second.value is not first.value
    np.testing.assert_array_equal(first.value.array, sent)
    expected = sent - gradient(0, 2) if with_optimizer else gradient(0, 2)
    np.testing.assert_array_equal(second.value.array, expected)
    # Only now nobody needs the old value any more.
    assert first.value in server.pool.in_use
    first.value.end_send()
    assert first.value not in server.pool.in_use


def test_a_value_that_nobody_is_sent_is_updated_in_place() -> None:
    server = Server(1)
    server.engine.set_optimizer(0, Subtracting())
    (first,) = server.push(0, 1, gradient(0, 1))
    first.value.begin_send()
    first.value.end_send()
    (second,) = server.push(0, 2, gradient(0, 2))
    assert second.value is first.value


@given(arrivals(), st.booleans(), st.booleans(), st.data())
@settings(max_examples=200)
def test_buffers_return_to_the_pool(
    job: Tuple[int, List[Tuple[int, int]]],
    deterministic: bool,
    with_optimizer: bool,
    data: st.DataObject,
) -> None:
    """When everything is sent, the value alone is in use, and no buffer was given back twice."""
    num_workers, pushes = job
    server = Server(num_workers, deterministic)
    if with_optimizer:
        server.engine.set_optimizer(0, Subtracting())
    sending: List[Tuple[Buffer, np.ndarray]] = []
    for rank, round_ in pushes:
        for result in server.push(rank, round_, gradient(rank, round_)):
            for _ in result.wanting:
                result.value.begin_send()
                sending.append((result.value, result.value.array.copy()))
        for _ in range(data.draw(st.integers(0, len(sending)))):
            end_send(sending.pop(data.draw(st.integers(0, len(sending) - 1))))
    for entry in sending:
        end_send(entry)
    assert server.pool.in_use == {server.slice_.value}


def end_send(entry: Tuple[Buffer, np.ndarray]) -> None:
    buffer, expected = entry
    np.testing.assert_array_equal(buffer.array, expected)
    buffer.end_send()


def test_the_pool_gives_memory_again_but_only_for_the_same_length_and_dtype() -> None:
    pool = BufferPool()
    first = pool.get(10, np.dtype(np.float32))
    assert pool.get(10, np.dtype(np.float32)) is not first
    first.retire()
    assert pool.get(5, np.dtype(np.float64)) is not first
    assert pool.get(10, np.dtype(np.float64)) is not first
    again = pool.get(10, np.dtype(np.float32))
    assert again is first
    assert again.array.dtype == np.float32
    assert len(again.bytes) == 40


def test_a_buffer_that_is_used_again_does_not_go_back_before_it_is_retired_again() -> None:
    pool = BufferPool()
    pool.get(10, np.dtype(np.float32)).retire()
    buffer = pool.get(10, np.dtype(np.float32))
    buffer.begin_send()
    buffer.end_send()
    assert pool.get(10, np.dtype(np.float32)) is not buffer


def test_an_update_that_fails_tells_so() -> None:
    class Failing(Subtracting):
        def update(self, *arguments: object, **more: object) -> None:
            raise ArithmeticError("no")

    server = Server(1)
    server.engine.set_optimizer(0, Failing())
    with pytest.raises(ArithmeticError):
        server.push(0, 1, gradient(0, 1))
