"""Slices of another size from a round on: values, sums and optimizer states go on bit for bit."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import own_layout  # noqa: F401  registers it
from p3kv.errors import ProtocolError
from p3kv.frontends.mxnet.optimizers.optimizer_settings import plain
from p3kv.frontends.mxnet.optimizers.server_optimizer import MXNetOptimizer
from p3kv.server.engine import ServerKey, ServerSlice
from p3kv.server.optimizer import Optimizer, State
from p3kv.slicing import Run, Slice, make_layout
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, SliceSizes, encode
from tests import engines
from tests.engines import ended, engine_of
from tests.jobs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
import optimizers

ROW = 6
SIZE = 17 * ROW
RANK = 1


def dense(*runs: Run) -> DeclaredKey:
    return DeclaredKey(0, "w", (SIZE,), "float32", list(runs))


def rows(*runs: Run) -> DeclaredKey:
    return DeclaredKey(0, "w", (SIZE // ROW, ROW), "float32", list(runs), layout="rows")


class Momentum(Optimizer):
    """What a state of a slice's own is good for, in four lines."""

    def __init__(self) -> None:
        self.states: Dict[int, np.ndarray] = {}

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("whoever sums does not configure")

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        state = self.states.setdefault(index, np.zeros_like(weight))
        state *= 0.5
        state += total
        weight -= state

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        state = self.states.pop(index, None)
        return None if state is None else State({"momentum": state}, {})

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        assert index not in self.states
        self.states[index] = state.elements["momentum"].copy()


class Server:
    """One server's part of one key, as its consumer uses it."""

    def __init__(self, optimizer: Optimizer, declared: DeclaredKey, workers: int) -> None:
        self.engine = engine_of(workers, RANK)
        self.sizes = self.engine._sizes
        self.engine.set_optimizer(0, optimizer)
        self._declared = declared
        self.pool = self.engine.state.pool
        self.results: Dict[int, np.ndarray] = {}

    @cached_property
    def key(self) -> ServerKey:
        """The key, declared when the slices' size is known."""
        key = self.engine.declare(self._declared)
        assert isinstance(key, ServerKey)
        return key

    def push(self, rank: int, round: int, gradient: np.ndarray) -> None:
        """Pushes a whole tensor for a round, slice by slice."""
        for piece in self._slices(round):
            if piece.server == RANK:
                slice_ = self.key.slice_at(round, piece.index, rank)
                buffer = self.pool.get(piece.length, np.dtype(np.float32))
                buffer.array[:] = gradient[piece.offset : piece.offset + piece.length]
                engines.push(slice_, rank, round, buffer, step=max(round, 1))
                for result in ended(self.engine.end_rounds(slice_)):
                    assert isinstance(result.record, ServerSlice)
                    value = result.record.known_value().array
                    self._note(result.record.index, result.number, value)

    def _note(self, index: int, round: int, value: np.ndarray) -> None:
        piece = self._slices(round)[index]
        whole = self.results.setdefault(round, np.full(SIZE, np.nan, np.float32))
        whole[piece.offset : piece.offset + piece.length] = value

    def _slices(self, round: int) -> Sequence[Slice]:
        return slices(self.key.declared, self.sizes.of(self.sizes.generation(round)).slice_size)


def slices(declared: DeclaredKey, size: int) -> Sequence[Slice]:
    return make_layout(declared.layout, declared.shape).slices(declared.runs, size)


def mine(declared: DeclaredKey, values: np.ndarray) -> np.ndarray:
    """What the server with `RANK` keeps of a tensor."""
    kept = [piece for piece in slices(declared, SIZE) if piece.server == RANK]
    return np.concatenate([values[piece.offset : piece.offset + piece.length] for piece in kept])


def tensor(*seed: int) -> np.ndarray:
    return np.random.RandomState([*seed, 7]).standard_normal(SIZE).astype(np.float32)


@st.composite
def sizes_by_round(draw: st.DrawFn) -> List[Tuple[int, int]]:
    rounds = sorted(draw(st.sets(st.integers(1, 8), max_size=4)))
    return [(round_, draw(st.integers(1, SIZE))) for round_ in [INITIAL_ROUND, *rounds]]


@given(
    sizes_by_round(),
    st.sampled_from(
        [
            dense((1, SIZE)),
            dense((1, 51), (0, 51)),
            dense((2, 1), (1, 71), (0, 30)),
            rows((1, SIZE)),
            rows((2, ROW), (1, 11 * ROW), (0, 5 * ROW)),
        ]
    ),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_values_do_not_depend_on_the_sizes_of_slices(
    table: List[Tuple[int, int]], declared: DeclaredKey, announced_late: bool
) -> None:
    server = Server(Momentum(), declared, workers=2)
    grain = ROW if declared.layout == "rows" else 1
    weight, state = tensor(0), np.zeros(SIZE, np.float32)
    if not announced_late:
        for entry in table:
            server.sizes.set(entry[0], SliceSizes(entry[1]))
    for round_ in range(INITIAL_ROUND, 10):
        if announced_late:
            # As in a job: before any slice of the round that is the last of its size.
            for entry in table:
                if entry[0] in (INITIAL_ROUND, round_ + 1):
                    server.sizes.set(entry[0], SliceSizes(entry[1]))
        if round_ == INITIAL_ROUND:
            server.push(0, round_, weight)
        else:
            gradients = [tensor(rank, round_) for rank in range(2)]
            for rank, gradient in enumerate(gradients):
                server.push(rank, round_, gradient)
            state = state * np.float32(0.5) + (gradients[0] + gradients[1])
            weight = weight - state
        result = server.results[round_]
        np.testing.assert_array_equal(mine(declared, result), mine(declared, weight))
        assert all(
            slice_.length % grain == 0
            for slice_ in server.key.all_records
            if isinstance(slice_, ServerSlice)
        )


def test_runs_with_parts_of_rows_are_refused() -> None:
    engine = engine_of(1, RANK)
    engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(SIZE))
    with pytest.raises(ProtocolError, match=r"\(1, 58\).* grains of 6 elements.*'rows'"):
        engine.declare(rows((0, 44), (1, 58)))
    assert not engine.keys


def test_slices_of_a_coming_size_wait_for_the_last_round_of_the_size_before() -> None:
    server = Server(Momentum(), dense((RANK, SIZE)), workers=1)
    server.sizes.set(INITIAL_ROUND, SliceSizes(40))
    server.sizes.set(2, SliceSizes(7))
    gradients = [tensor(round_) for round_ in range(4)]
    server.push(0, INITIAL_ROUND, gradients[0])
    server.push(0, 2, gradients[2])
    assert set(server.results) == {INITIAL_ROUND}
    server.push(0, 1, gradients[1])
    assert set(server.results) == {INITIAL_ROUND, 1, 2}
    half = np.float32(0.5)
    after_1 = gradients[0] - gradients[1]
    np.testing.assert_array_equal(server.results[1], after_1)
    np.testing.assert_array_equal(server.results[2], after_1 - (gradients[1] * half + gradients[2]))
    server.push(0, 3, gradients[3])
    assert not np.isnan(server.results[3]).any()


def test_a_push_for_a_round_of_an_earlier_size_is_refused() -> None:
    server = Server(Momentum(), dense((RANK, SIZE)), workers=1)
    server.sizes.set(INITIAL_ROUND, SliceSizes(40))
    server.sizes.set(2, SliceSizes(7))
    for round_ in range(3):
        server.push(0, round_, tensor(round_))
    with pytest.raises(ProtocolError, match="no slice 0 for round 1"):
        server.key.slice_at(1, 0, rank=0)
    with pytest.raises(ProtocolError, match="no slice 99 for round 3"):
        server.key.slice_at(3, 99, rank=0)


@pytest.mark.parametrize("name", list(optimizers.OPTIMIZERS))
def test_states_of_mxnet_s_optimizers_are_cut_anew(name: str) -> None:
    made, beside = optimizers.made(name), optimizers.made(name)
    optimizer = MXNetOptimizer()
    optimizer.configure(1, encode(plain(made, 1)), 0)
    updater = mx.optimizer.get_updater(beside)
    server = Server(optimizer, dense((RANK, SIZE)), workers=1)
    for entry in ((INITIAL_ROUND, 30), (3, 11), (4, 101), (6, 50)):
        server.sizes.set(entry[0], SliceSizes(entry[1]))
    weight = mx.nd.array(tensor(0))
    server.push(0, INITIAL_ROUND, tensor(0))
    for round_ in range(1, 8):
        server.push(0, round_, tensor(round_))
        updater("w", mx.nd.array(tensor(round_)), weight)
        np.testing.assert_array_equal(server.results[round_], weight.asnumpy())
