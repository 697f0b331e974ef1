"""Sums of float16 and bfloat16: in float32 until all gradients are in."""

from __future__ import annotations

from typing import List, Optional

import numpy as np
import pytest

from p3kv.common.registry import Choice
from p3kv.server.engine.state import BufferPool
from p3kv.server.optimizer import Optimizer, State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import CodecChoices, DeclaredKey
from tests import engines
from tests.engines import engine_of, one_slice, push_encoded, with_values

WORKERS, LENGTH = 4, 30


class Noting(Optimizer):
    """Keeps the totals, and takes them for values."""

    def __init__(self) -> None:
        self.totals: List[np.ndarray] = []

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("whoever sums does not configure")

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        self.totals.append(total.copy())
        weight[:] = total

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        raise AssertionError("it has no states")

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        raise AssertionError("it has no states")


def gradient(rank: int, half: np.dtype) -> np.ndarray:
    """In half precision, the sum of two of these is infinite."""
    most = 60_000 if half == np.float16 else 3e38
    values = np.random.RandomState(rank).standard_normal(LENGTH)
    values[0] = most if rank % 2 else -most
    values[1] = (40_000, 40_000, -40_000, -39_999)[rank % WORKERS]
    return values.astype(half)


@pytest.mark.parametrize(
    "dtype, codec", [("float16", "identity"), ("float16", "float16"), ("bfloat16", "identity")]
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("updates", [False, True])
def test_a_sum_is_rounded_to_half_precision_once_and_only_for_the_value(
    updates: bool, deterministic: bool, dtype: str, codec: str
) -> None:
    half = np.dtype(dtype)
    pool = BufferPool()
    engine = engine_of(WORKERS, pool=pool, deterministic=deterministic)
    optimizer = Noting()
    if updates:
        engine.set_optimizer(0, optimizer)
    codecs = CodecChoices(Choice(codec))
    key = DeclaredKey(0, "w", (LENGTH,), dtype, [(0, LENGTH)], codecs=codecs)
    slice_ = one_slice(engine, key)

    def push(rank: int, round_: int, values: np.ndarray, encoded: bool) -> None:
        buffer = pool.get(LENGTH, half)
        buffer.array[:] = values
        if encoded:
            push_encoded(slice_, rank, round_, buffer, round_)
        else:
            engines.push(slice_, rank, round_, buffer, step=round_)

    initial = gradient(9, half)
    push(0, INITIAL_ROUND, initial, False)
    (result,) = with_values(engine.end_rounds(slice_))
    np.testing.assert_array_equal(result.value.array, initial)
    for round_ in (1, 2):
        expected = np.zeros(LENGTH, np.float32)
        for rank in range(WORKERS):
            push(rank, round_, gradient(rank, half), codec != "identity")
            expected += gradient(rank, half)
        assert np.isfinite(expected).all()
        (result,) = with_values(engine.end_rounds(slice_))
        assert result.value.array.dtype == half
        np.testing.assert_array_equal(result.value.array, expected.astype(half))
    for total in optimizer.totals:
        assert total.dtype == np.float32
        np.testing.assert_array_equal(total, expected)
    assert len(optimizer.totals) == 2 * updates
