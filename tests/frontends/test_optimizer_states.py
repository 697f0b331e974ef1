"""States of optimizers, exported and loaded: stored and cut anew, they go on bit for bit."""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet.optimizers.optimizer_settings import plain
from p3kv.frontends.mxnet.optimizers.plain_states import take_apart
from p3kv.frontends.mxnet.optimizers.server_optimizer import MXNetOptimizer
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.server.optimizer import WHOLE, State
from p3kv.wire.messages import DeclaredKey, decode, encode
from tests.jobs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
import optimizers

SIZE = 67
KEY = DeclaredKey(0, "w", (SIZE,), "float32", [(0, SIZE)])
Make = Callable[[], mx.optimizer.Optimizer]
CASES: Dict[str, Tuple[str, Dict[str, Any]]] = {
    **{name: ("float32", {}) for name in (*optimizers.OPTIMIZERS, *optimizers.IN_ORDER)},
    # Some of MXNet's other optimizers can't update float64.
    **{f"{name}, float64": ("float64", {}) for name in ("sgd momentum", "adam", "adamax")},
    # States within states, some of them None.
    **{
        f"{name}, float16": ("float16", {"multi_precision": True})
        for name in ("sgd", "sgd momentum", "adam")
    },
}


@st.composite
def partitions(draw: st.DrawFn) -> List[int]:
    """The lengths of consecutive slices."""
    inner = draw(st.sets(st.integers(1, SIZE - 1), max_size=4))
    ends = [0, *sorted(inner), SIZE]
    return [end - start for start, end in zip(ends, ends[1:])]


def tensor(seed: int, dtype: str) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(SIZE).astype(dtype)


def total_of(gradient: np.ndarray) -> np.ndarray:
    """As servers sum it."""
    return gradient.astype(np.float32) if gradient.dtype == np.float16 else gradient


class Sliced:
    """A server's weight, updated slice by slice."""

    def __init__(self, make: Make, dtype: str, lengths: Sequence[int]) -> None:
        self._optimizer = MXNetOptimizer()
        self._worker = WorkerOptimizer(make(), 0)
        self._optimizer.configure(1, self._worker.settings, 0)
        self._told = 0
        self._dtype = dtype
        self._lengths = lengths
        self.weight = tensor(0, dtype)

    def update(self, step: int) -> None:
        while self._told < step and self._worker.shares_numbers:
            self._told += 1
            number = self._worker.shared_number(KEY.key, self._told)
            assert number is not None
            self._optimizer.configure(self._told, number, 0)
        gradient = total_of(tensor(step, self._dtype))
        for index, start, end in self._slices():
            weight, total = self.weight[start:end].copy(), gradient[start:end].copy()
            self._optimizer.update(KEY, index, weight, total, step)
            self.weight[start:end] = weight

    def export(self) -> Optional[State]:
        """The whole key's state; this server has none any more."""
        states = [self._optimizer.export(KEY, index) for index, _, _ in self._slices()]
        for state, length in zip(states, self._lengths):
            assert state is None or all(len(a) == length for a in state.elements.values())
        known = [state for state in states if state is not None]
        assert len(known) in (0, len(states))
        assert self._optimizer.export(KEY, 0) is None
        return State.joined(known) if known else None

    def load(self, state: State) -> None:
        for (index, _, _), piece in zip(self._slices(), state.cut(self._lengths)):
            self._optimizer.load(KEY, index, piece)

    def _slices(self) -> Iterator[Tuple[int, int, int]]:
        ends = list(accumulate(self._lengths))
        return ((i, end - self._lengths[i], end) for i, end in enumerate(ends))


def stored(state: State) -> State:
    """The state after it was on a disk, as bytes and numbers."""
    arrays: Any = {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in state.elements.items()}
    arrays, numbers = decode(encode([arrays, state.numbers]), list)
    return State(
        {
            name: np.frombuffer(data, dtype).reshape(shape)
            for name, (dtype, shape, data) in arrays.items()
        },
        numbers,
    )


def same(one: State, other: State) -> None:
    assert one.numbers == other.numbers
    assert one.elements.keys() == other.elements.keys()
    for name, array in one.elements.items():
        assert array.dtype == other.elements[name].dtype
        np.testing.assert_array_equal(array, other.elements[name])


@pytest.mark.parametrize("case", list(CASES))
@given(before=partitions(), after=partitions())
@settings(max_examples=4, deadline=None)
def test_a_state_that_is_stored_and_cut_anew_goes_on_as_if_it_had_stayed(
    case: str, before: List[int], after: List[int]
) -> None:
    dtype, more = CASES[case]

    def make() -> mx.optimizer.Optimizer:
        return optimizers.made(case.partition(",")[0], **more)

    whole, cut, other = (Sliced(make, dtype, lengths) for lengths in ([SIZE], before, after))
    assert cut.export() is None
    for step in (1, 2):
        whole.update(step)
        cut.update(step)
    exported = cut.export()
    assert exported is not None
    other.weight = cut.weight
    other.load(stored(exported))
    for step in (3, 4):
        whole.update(step)
        other.update(step)
    np.testing.assert_array_equal(other.weight, whole.weight)
    mine, theirs = whole.export(), other.export()
    assert mine is not None and theirs is not None
    same(mine, theirs)
    other.load(theirs)
    again = other.export()
    assert again is not None
    same(again, theirs)


SHAPES = {"float16": (10, 7), "float32": (3, 41), "float64": (50, 2)}
WHOLE_CASES = [
    *[(name, "float32", {}) for name in (*optimizers.WHOLE_OPTIMIZERS, "jittering", "sgld")],
    *[(name, "float64", {}) for name in ("lars momentum", "lamb", "lbsgd by lars", "bynorm")],
    *[
        (name, "float16", {"multi_precision": True})
        for name in ("lars momentum", "lamb", "groupadagrad", "sgld")
    ],
]


@pytest.mark.parametrize(
    ("name", "dtype", "more"), WHOLE_CASES, ids=lambda value: str(value) if value else ""
)
def test_the_state_of_a_whole_tensor_goes_on_in_another_server(
    name: str, dtype: str, more: Dict[str, Any]
) -> None:
    """After settings have changed, too: what an optimizer keeps for a key stays."""
    shape = SHAPES[dtype]
    size = int(np.prod(shape))
    key = DeclaredKey(0, "w", shape, "float32", [(0, size)])
    stayed, first, second = (MXNetOptimizer() for _ in range(3))
    servers, weights = [stayed, first], [np.ones(size, dtype), np.ones(size, dtype)]
    worker = WorkerOptimizer(optimizers.made(name, **more), 0)
    for optimizer in (stayed, first, second):
        optimizer.configure(1, worker.settings, 0)
    changed = optimizers.made(name, **more)
    changed.set_learning_rate(0.05)
    settings = encode(plain(changed, 0, worker._seed))
    for step in range(1, 8):
        if step == 3:
            for optimizer in (stayed, first, second):
                optimizer.configure(3, settings, 0)
        if step == 4:
            state = first.export(key, WHOLE)
            assert state is not None
            second.load(key, WHOLE, stored(state) if dtype == "float32" else state)
            assert first.export(key, WHOLE) is None
            servers[1] = second
        for optimizer, weight in zip(servers, weights):
            total = np.random.RandomState(step).standard_normal(size).astype(dtype)
            optimizer.update(key, WHOLE, weight, total_of(total), step)
    np.testing.assert_array_equal(*weights)
    assert np.isfinite(weights[0]).all()
    assert (weights[0] != 1).any()


def test_a_state_that_can_not_be_stored_is_refused_by_the_name_of_its_type() -> None:
    with pytest.raises(NotSupportedError, match="has a set"):
        take_apart((None, {3}), {})


def test_the_structure_of_a_state_is_plain() -> None:
    found = {}
    for name in ("test", "sgd", "adam", "dcasgd"):
        sliced = Sliced(lambda name=name: optimizers.made(name), "float32", [SIZE])  # type: ignore
        sliced.update(1)
        state = sliced.export()
        assert state is not None
        assert state.numbers["updates"] == 1
        found[name] = (state.numbers["structure"], sorted(state.elements))
    assert found == {
        "test": ("0", ["0"]),
        "sgd": (None, []),
        "adam": (["0", "1"], ["0", "1"]),
        "dcasgd": ([None, "0"], ["0"]),
    }


def test_a_loaded_state_shares_no_memory_with_what_was_loaded() -> None:
    sliced = Sliced(lambda: optimizers.made("adam"), "float32", [SIZE])
    sliced.update(1)
    exported = sliced.export()
    assert exported is not None
    kept = {name: array.copy() for name, array in exported.elements.items()}
    sliced.load(exported)
    sliced.update(2)
    same(exported, State(kept, exported.numbers))
