"""Rows that a seed gives: the same wherever they are made, and of the distribution that was asked
for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.common.seeded_rows import seeded_rows


@given(
    st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=20).map(sorted),
    st.integers(1, 9),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_a_row_depends_on_its_number_alone(
    numbers: list, row_elems: int, seed: int, uniform: bool
) -> None:
    every = seeded_rows(np.array(numbers), row_elems, seed, 0.5, uniform)
    for number, row in zip(numbers, every):
        alone = seeded_rows(np.array([number]), row_elems, seed, 0.5, uniform)
        assert np.array_equal(alone[0], row) and np.isfinite(row).all()


@pytest.mark.parametrize("uniform", [False, True])
def test_rows_have_the_deviation_that_was_asked_for(uniform: bool) -> None:
    rows = seeded_rows(np.arange(20_000), 15, 7, 0.5, uniform).astype(np.float64)
    assert abs(rows.mean()) < 0.005 and abs(rows.std() - 0.5) < 0.005
    fourth = (rows**4).mean() / rows.var() ** 2
    assert fourth == pytest.approx(1.8 if uniform else 3.0, abs=0.05)
    neighbours = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
    columns = np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]
    other = np.corrcoef(rows.ravel(), seeded_rows(np.arange(20_000), 15, 8, 0.5, uniform).ravel())
    assert max(map(abs, (neighbours, columns, other[0, 1]))) < 0.03
