"""Clipping by the norm of all gradients, with the optimizer on the servers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from p3kv.errors import ProtocolError
from p3kv.frontends.mxnet.environment import runs_operations_at_once
from p3kv.server.engine.state import ClippedSteps, exact_squares, sum_of_squares
from p3kv.worker.global_norms import norm_of
from tests.jobs import SCRIPTS, run_job

sys.path.insert(0, str(SCRIPTS))
import clipped


@pytest.mark.parametrize(
    ("servers", "slice_size", "exact"),
    [(2, 100, False), pytest.param(1, 37, True, marks=pytest.mark.long)],
)
def test_weights_are_those_of_one_process_that_clips(
    tmp_path: Path, servers: int, slice_size: int, exact: bool
) -> None:
    """In deterministic mode bit for bit, whatever the slices and servers."""
    arguments = [tmp_path, *(["exact"] if exact else [])]
    result = run_job(
        "clipped.py", arguments, 2, servers, P3KV_SLICE_SIZE=slice_size,
        P3KV_DETERMINISTIC=int(exact),
    )  # fmt: skip
    assert result.code == 0, result.output
    for rank in range(2):
        passed = (tmp_path / f"rank{rank}").read_text().split()
        checks = clipped.OF_NUMBERS if exact else clipped.CHECKS
        assert passed == [check.__name__ for check in checks], result.output
    assert exact or "the norm of all gradients is inf" in result.said_by("worker 0")


# Sums of squares.

FLOATS = arrays.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32))


@given(FLOATS, st.data())
@settings(max_examples=300, deadline=None)
def test_exact_squares_do_not_depend_on_how_a_tensor_is_cut(
    tensor: np.ndarray, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tensor)))
    whole = norm_of(exact_squares(tensor))
    parts = norm_of(exact_squares(tensor[cut:]) + exact_squares(tensor[:cut]))
    expected = norm_of(list(np.square(tensor, dtype=np.float64)))
    np.testing.assert_array_equal([whole, parts], [expected, expected])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e19])
def test_squares_are_summed_well(dtype: str, factor: float) -> None:
    tensor = (np.random.RandomState(1).standard_normal(100_003) * factor).astype(dtype)
    expected = math.fsum(np.square(tensor, dtype=np.float64))
    # In float32, squares below 1e-38 are lost: such a norm clips nothing.
    assert sum_of_squares(tensor) == pytest.approx(expected, rel=1e-6, abs=1e-38)
    found = math.fsum(exact_squares(tensor))
    if dtype == "float32" or factor == 1.0:
        assert found == expected
    assert found == pytest.approx(expected, rel=1e-15)


# What a server takes from worker rank 0.


class Server:
    """A server's part of a clipped step, with names for slices."""

    def __init__(self) -> None:
        self.clipped = ClippedSteps(2, exact=False)

    @property
    def sent(self) -> List[Tuple[int, float]]:
        """Steps of which the squares are complete, and their sums."""
        steps = self.clipped.steps
        return [(step, math.fsum(steps[step].squares)) for step in self.clipped.complete]

    def complete(self, step: int, name: str) -> np.ndarray:
        total = np.full(3, 2, np.float32)
        self.clipped.count(step, name, len(total), total)
        return total


@pytest.mark.parametrize("told_first", [True, False])
def test_squares_are_sent_when_all_that_was_pushed_is_summed(told_first: bool) -> None:
    server = Server()
    server.clipped.begin(7)
    assert list(server.clipped.steps) == [7] and server.clipped.steps[7].scale is None
    if told_first:
        server.clipped.end_pushes(7, 6)
    totals = [server.complete(7, "a")]
    assert not server.sent
    totals.append(server.complete(7, "b"))
    if not told_first:
        assert not server.sent
        server.clipped.end_pushes(7, 6)
    assert server.sent == [(7, 24.0)]
    assert list(server.clipped.scaled(7, 0.5)) == ["a", "b"]
    assert server.clipped.steps[7].scale == 0.5
    for total in totals:
        server.clipped.scale(7, len(total), total, total)
        np.testing.assert_array_equal(total, np.ones(3))
    assert not server.clipped.steps


def test_a_server_without_a_key_of_the_step_sends_nothing() -> None:
    server = Server()
    server.clipped.begin(7)
    server.clipped.end_pushes(7, 0)
    assert not list(server.clipped.scaled(7, 1.0))
    assert not server.sent and not server.clipped.steps


def test_words_that_can_not_be_right_are_refused() -> None:
    server = Server()
    for speak in (
        lambda: server.clipped.end_pushes(7, 3),
        lambda: server.clipped.scaled(7, 1.0),
    ):
        with pytest.raises(ProtocolError, match="has not begun"):
            speak()
    server.clipped.begin(7)
    with pytest.raises(ProtocolError, match="twice"):
        server.clipped.begin(7)
    with pytest.raises(ProtocolError, match="norm is not known"):
        server.clipped.scaled(7, 1.0)
    server.clipped.end_pushes(7, 3)
    with pytest.raises(ProtocolError, match="twice"):
        server.clipped.end_pushes(7, 3)
    server.complete(7, "a")
    with pytest.raises(ProtocolError, match="more than the 3 elements"):
        server.complete(7, "b")


def test_the_engine_that_waits_for_each_push_is_known() -> None:
    assert runs_operations_at_once({"MXNET_ENGINE_TYPE": "NaiveEngine"})
    assert not runs_operations_at_once({})
