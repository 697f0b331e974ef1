"""Slices of another size from a round on: values, sums and optimizer states go on bit for bit."""

from __future__ import annotations

import sys
from typing import Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.consistency import BulkSynchronous
from p3kv.errors import ProtocolError
from p3kv.frontends.mxnet.optimizer_settings import to_bytes
from p3kv.frontends.mxnet.server_optimizer import MXNetOptimizer
from p3kv.server.aggregation import Aggregator, SliceState
from p3kv.server.buffers import BufferPool
from p3kv.server.keys import ServerKey
from p3kv.server.optimizer import Optimizer, State
from p3kv.slicing import Run, cut
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import KeyLayout, Terms
from p3kv.wire.terms import TermsByRound
from tests.jobs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
import optimizers

SIZE = 101
RANK = 1


class Momentum(Optimizer):
    """What a state of a slice's own is good for, in four lines."""

    def __init__(self) -> None:
        self.states: Dict[int, np.ndarray] = {}

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("whoever sums does not configure")

    def update(
        self, layout: KeyLayout, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        state = self.states.setdefault(index, np.zeros_like(weight))
        state *= 0.5
        state += total
        weight -= state

    def export(self, layout: KeyLayout, index: int) -> Optional[State]:
        state = self.states.pop(index, None)
        return None if state is None else State({"momentum": state}, {})

    def load(self, layout: KeyLayout, index: int, state: State) -> None:
        assert index not in self.states
        self.states[index] = state.elements["momentum"].copy()


class Server:
    """One server's part of one key, as its consumer uses it."""

    def __init__(self, optimizer: Optimizer, runs: List[Run], workers: int) -> None:
        self.terms = TermsByRound()
        rule = BulkSynchronous(workers)
        layout = KeyLayout(0, "w", "float32", runs)
        self.key = ServerKey(layout, RANK, self.terms, rule.window)
        self.aggregator = Aggregator(rule, BufferPool())
        self.aggregator.optimizers[0] = optimizer
        self.pool = BufferPool()
        self.results: Dict[int, np.ndarray] = {}

    def push(self, rank: int, round: int, gradient: np.ndarray) -> None:
        """Pushes a whole tensor for a round, slice by slice."""
        layout = self.key.layout
        size = self.terms.of(self.terms.generation(round)).slice_size
        for piece in cut(layout.runs, size):
            if piece.server == RANK:
                state = self.key.state(round, piece.index)
                buffer = self.pool.get(piece.length, state.dtype)
                buffer.array[:] = gradient[piece.offset : piece.offset + piece.length]
                self.aggregator.push(state, rank, round, buffer, True, 0, max(round, 1))
                if self._end_rounds(state):
                    for other in self.key.reslice(self.pool, self.aggregator.optimizers.get(0)):
                        self._end_rounds(other)

    def _end_rounds(self, state: SliceState) -> int:
        ended = 0
        for result in self.aggregator.end_rounds(state):
            self._note(state.index, result.round, result.value.array)
            ended += 1
        return ended

    def _note(self, index: int, round: int, value: np.ndarray) -> None:
        layout = self.key.layout
        size = self.terms.of(self.terms.generation(round)).slice_size
        piece = cut(layout.runs, size)[index]
        whole = self.results.setdefault(round, np.full(SIZE, np.nan, np.float32))
        whole[piece.offset : piece.offset + piece.length] = value


def mine(runs: List[Run], values: np.ndarray) -> np.ndarray:
    """What the server with `RANK` keeps of a tensor."""
    kept = [piece for piece in cut(runs, SIZE) if piece.server == RANK]
    return np.concatenate([values[piece.offset : piece.offset + piece.length] for piece in kept])


def tensor(*seed: int) -> np.ndarray:
    return np.random.RandomState([*seed, 7]).standard_normal(SIZE).astype(np.float32)


@st.composite
def sizes_by_round(draw: st.DrawFn) -> List[Tuple[int, int]]:
    rounds = sorted(draw(st.sets(st.integers(1, 8), max_size=4)))
    return [(round_, draw(st.integers(1, SIZE))) for round_ in [INITIAL_ROUND, *rounds]]


@given(
    sizes_by_round(),
    st.sampled_from([[(1, 101)], [(1, 51), (0, 50)], [(2, 1), (1, 70), (0, 30)]]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_values_do_not_depend_on_the_sizes_of_slices(
    table: List[Tuple[int, int]], runs: List[Run], announced_late: bool
) -> None:
    server = Server(Momentum(), runs, workers=2)
    weight, state = tensor(0), np.zeros(SIZE, np.float32)
    if not announced_late:
        for entry in table:
            server.terms.set(entry[0], Terms(entry[1]))
    for round_ in range(INITIAL_ROUND, 10):
        if announced_late:
            # As in a job: before any slice of the round that is the last of its size.
            for entry in table:
                if entry[0] in (INITIAL_ROUND, round_ + 1):
                    server.terms.set(entry[0], Terms(entry[1]))
        if round_ == INITIAL_ROUND:
            server.push(0, round_, weight)
        else:
            gradients = [tensor(rank, round_) for rank in range(2)]
            for rank, gradient in enumerate(gradients):
                server.push(rank, round_, gradient)
            state = state * np.float32(0.5) + (gradients[0] + gradients[1])
            weight = weight - state
        result = server.results[round_]
        np.testing.assert_array_equal(mine(runs, result), mine(runs, weight))


def test_slices_of_a_coming_size_wait_for_the_last_round_of_the_size_before() -> None:
    server = Server(Momentum(), [(RANK, SIZE)], workers=1)
    server.terms.set(INITIAL_ROUND, Terms(40))
    server.terms.set(2, Terms(7))
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
    server = Server(Momentum(), [(RANK, SIZE)], workers=1)
    server.terms.set(INITIAL_ROUND, Terms(40))
    server.terms.set(2, Terms(7))
    for round_ in range(3):
        server.push(0, round_, tensor(round_))
    with pytest.raises(ProtocolError, match="no slice 0 for round 1"):
        server.key.state(1, 0)
    with pytest.raises(ProtocolError, match="no slice 99 for round 3"):
        server.key.state(3, 99)


@pytest.mark.parametrize("name", list(optimizers.OPTIMIZERS))
def test_states_of_mxnet_s_optimizers_are_cut_anew(name: str) -> None:
    made, beside = optimizers.made(name), optimizers.made(name)
    optimizer = MXNetOptimizer()
    optimizer.configure(1, to_bytes(made, 1), 0)
    updater = mx.optimizer.get_updater(beside)
    server = Server(optimizer, [(RANK, SIZE)], workers=1)
    for entry in ((INITIAL_ROUND, 30), (3, 11), (4, 101), (6, 50)):
        server.terms.set(entry[0], Terms(entry[1]))
    weight = mx.nd.array(tensor(0))
    server.push(0, INITIAL_ROUND, tensor(0))
    for round_ in range(1, 8):
        server.push(0, round_, tensor(round_))
        updater("w", mx.nd.array(tensor(round_)), weight)
        np.testing.assert_array_equal(server.results[round_], weight.asnumpy())
