"""A bucket's tensors are updated as one where they can be, with the numbers of each by itself."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import ProtocolError
from p3kv.server.engine import BucketSlice, ServerKey
from p3kv.server.optimizer import Optimizer, State
from p3kv.server.saving.key_cuts import KeyCut
from p3kv.slicing import BUCKET
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, Member, SliceSizes
from tests import engines
from tests.engines import ended, engine_of

SHAPES = [(2, 3), (1,), (4,)]
MEMBERS = [Member(at, shape, f"w{at}") for at, shape in enumerate(SHAPES)]
SIZE = 11
SPANS = [slice(0, 6), slice(6, 7), slice(7, 11)]
EVERYONE, NOBODY = 0, 0b111


def bucket(*members: Member, runs: Tuple[Tuple[int, int], ...] = ((0, SIZE),)) -> DeclaredKey:
    return DeclaredKey(
        0, 0, (SIZE,), "float32", list(runs), "w", layout=BUCKET, members=list(members or MEMBERS)
    )


class Counting(Optimizer):
    """An element changes by the sum of its gradients and by how often it was updated, as Adam's
    do."""

    def __init__(self) -> None:
        self.states: Dict[int, Tuple[np.ndarray, int]] = {}
        self.updates = 0

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("whoever sums does not configure")

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        sums, count = self.states.get(index, (np.zeros_like(weight), 0))
        self.states[index] = sums + total, count + 1
        self.updates += 1
        weight -= (sums + total) * np.float32(count + 1)

    def predicted(
        self, key: DeclaredKey, index: int, weight: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        return weight - np.float32(self.states[index][1]) if index in self.states else None

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        sums, count = self.states.pop(index, (None, 0))
        return None if sums is None else State({"sums": sums}, {"count": count})

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        assert index not in self.states
        self.states[index] = state.elements["sums"].copy(), state.numbers["count"]


class Server:
    def __init__(self, workers: int) -> None:
        self.engine = engine_of(workers)
        self.optimizer = Counting()
        self.engine.set_optimizer(0, self.optimizer)
        self.sizes = self.engine._sizes
        self.sizes.set(INITIAL_ROUND, SliceSizes(5))
        key = self.engine.declare(bucket())
        assert isinstance(key, ServerKey)
        self.key = key

    @property
    def slice_(self) -> BucketSlice:
        assert self.key.bucket is not None
        return self.key.bucket

    def push(self, rank: int, round_: int, gradient: Optional[np.ndarray], lacking: int) -> None:
        slice_ = self.key.slice_at(round_, 0, rank)
        step = max(round_, 1)
        if gradient is None:
            engines.push(slice_, rank, round_, None, step=step)
        else:
            buffer = self.engine.state.pool.get(SIZE, np.dtype(np.float32))
            buffer.array[:] = gradient
            engines.push(slice_, rank, round_, buffer, step=step, lacking=lacking)
        for one in ended(self.engine.end_rounds(slice_)):
            assert one.number == round_

    @property
    def value(self) -> np.ndarray:
        return self.slice_.known_value().array

    def states(self) -> List[Optional[Tuple[List[float], int]]]:
        found = self.slice_.copied_states(self.optimizer)
        return [one and (one.elements["sums"].tolist(), one.numbers["count"]) for one in found]


def tensor(*seed: int) -> np.ndarray:
    """Small whole numbers, of which sums are exact."""
    return np.random.RandomState([*seed, 7]).randint(-8, 8, SIZE).astype(np.float32)


def without(gradient: np.ndarray, lacking: int) -> np.ndarray:
    for at, span in enumerate(SPANS):
        if lacking >> at & 1:
            gradient[span] = 0
    return gradient


masks = st.one_of(st.just(EVERYONE), st.integers(EVERYONE, NOBODY))


@given(
    st.lists(st.tuples(masks, masks, st.booleans()), min_size=1, max_size=8),
    st.sets(st.integers(2, 8)),
)
@settings(max_examples=80, deadline=None)
def test_a_tensor_is_updated_when_any_worker_has_a_gradient_of_it(
    rounds: List[Tuple[int, int, bool]], resized: set
) -> None:
    """`resized`: rounds from which on slices have another size. A state is replaced by itself now
    and then, as after a checkpoint."""
    server = Server(workers=2)
    value = tensor(0)
    server.push(0, INITIAL_ROUND, value, EVERYONE)
    sums, counts = np.zeros(SIZE, np.float32), [0] * len(SPANS)
    for round_, (*lacks, replaces) in enumerate(rounds, 1):
        if round_ + 1 in resized:
            server.sizes.set(round_ + 1, SliceSizes(round_ + 1))
        for rank, lacking in enumerate(lacks):
            gradient = without(tensor(rank, round_), lacking)
            server.push(rank, round_, None if lacking == NOBODY else gradient, lacking)
            sums += gradient
        for at, span in enumerate(SPANS):
            if not (lacks[0] & lacks[1]) >> at & 1:
                counts[at] += 1
                value[span] -= sums[span] * np.float32(counts[at])
        np.testing.assert_array_equal(server.value, value)
        expected = [
            (sums[span].tolist(), count) if count else None for span, count in zip(SPANS, counts)
        ]
        assert server.states() == expected
        if replaces:
            optimizer = server.optimizer
            for member, state in enumerate(server.slice_.copied_states(optimizer)):
                server.slice_.replace_state(optimizer, member, state)
            assert server.states() == expected


def test_one_update_serves_all_tensors_and_does_again_once_their_states_are_alike() -> None:
    server = Server(workers=1)
    server.push(0, INITIAL_ROUND, tensor(0), EVERYONE)
    server.push(0, 1, tensor(1), EVERYONE)
    assert server.optimizer.updates == 1
    server.push(0, 2, without(tensor(2), 0b010), 0b010)
    server.push(0, 3, tensor(3), EVERYONE)
    assert server.optimizer.updates == 1 + 2 + 3
    alike = State({"sums": np.zeros(SIZE, np.float32)}, {"count": 4})
    lengths = [member.size_elems for member in MEMBERS]
    for member, state in enumerate(alike.cut(lengths)):
        server.slice_.replace_state(server.optimizer, member, state)
    server.push(0, 4, tensor(4), EVERYONE)
    assert server.optimizer.updates == 1 + 2 + 3 + 1
    assert list(server.optimizer.states) == [0] and server.optimizer.states[0][1] == 5


def test_a_prediction_is_that_of_each_tensor() -> None:
    server = Server(workers=1)
    server.push(0, INITIAL_ROUND, tensor(0), EVERYONE)
    server.push(0, 1, without(tensor(1), 0b001), 0b001)
    predicted = server.slice_._predicted_by(server.optimizer, server.value, 1, False)
    assert predicted is not None
    np.testing.assert_array_equal(server.value - predicted, [0] * 6 + [1] * 5)


def test_a_checkpoint_has_each_tensor_by_itself() -> None:
    server = Server(workers=1)
    server.push(0, INITIAL_ROUND, tensor(0), EVERYONE)
    server.push(0, 1, without(tensor(1), 0b010), 0b010)
    cut = KeyCut(server.key.declared, 1, False, 1)
    cut.copy(server.slice_)
    keys = cut.complete
    outlines = [key.outline for key in keys]
    assert [(one.key, one.name, one.shape) for one in outlines] == [
        (member.key, member.name, member.shape) for member in MEMBERS
    ]
    assert [one.runs for one in outlines] == [[(0, 6)], [(0, 1)], [(0, 4)]]
    assert [one.numbers for one in outlines] == [{"count": 1}, None, {"count": 1}]
    np.testing.assert_array_equal(np.concatenate([key.value[0] for key in keys]), server.value)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (lambda: bucket(MEMBERS[0]), "a bucket of 1 tensors"),
        (lambda: bucket(*MEMBERS[:2]), r"shape \(11,\), and its tensors 7 elements"),
        (lambda: bucket(runs=((0, 5), (1, 6))), "break grains of 11 elements"),
        (
            lambda: DeclaredKey(0, 0, (SIZE,), "float32", [(0, SIZE)], layout=BUCKET),
            "has 0 tensors",
        ),
    ],
)
def test_a_bucket_that_can_t_be_right_is_refused(declared: object, says: str) -> None:
    engine = engine_of(1)
    engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(SIZE))
    with pytest.raises(ProtocolError, match=says):
        engine.declare(declared())  # type: ignore[operator]
