"""Dense keys travel without rows that need not: when it pays, bit for bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.codecs import VALUES, Identity, Part
from p3kv.codecs.zero_rows import COSTS, ZeroRows, row_elems
from p3kv.errors import ProtocolError
from tests.frontends.test_torch import job as torch_job
from tests.jobs import run_job
from tests.torch_environment import NEEDS_TORCH
from tests.whole_jobs.test_host_sums import run_on_hosts

GIGABIT_S = 8e-9


def rows_of(columns: int, dtype: str = "float32", link_s: float = GIGABIT_S) -> ZeroRows:
    codec = Identity(10_000, np.dtype(dtype))
    return ZeroRows(codec, (10_000 // columns, columns), lambda: link_s, "gradients of 'w'")


def test_it_pays_by_what_it_takes_of_processors_and_links() -> None:
    # By hand, of rows of 2 KB: 0.127 ns of looking and 0.1 of copying a byte; 0.3 of sending it.
    assert COSTS.pays_from(2048, 0.0) == pytest.approx(0.2273 / 0.4, rel=0.01)
    assert COSTS.pays_from(2048, GIGABIT_S) == pytest.approx(0.2273 / 8.4, rel=0.01)
    # Short rows take longer to look at; on a slow link nearly any zero pays.
    assert COSTS.pays_from(32, 0.0) > 1
    assert COSTS.pays_from(32, GIGABIT_S) < 0.1
    assert COSTS.pays_from(2048, 80e-9) < 0.005


@pytest.mark.parametrize(
    ("share", "link_s", "leaves_out"),
    [(0.02, GIGABIT_S, False), (0.06, GIGABIT_S, True), (0.5, 0.0, False), (0.7, 0.0, True)],
)
def test_the_first_rounds_decide(share: float, link_s: float, leaves_out: bool) -> None:
    rows = rows_of(100, link_s=link_s)
    few = np.ones((100, 100), np.float32)
    few[: round(100 * share)] = 0
    np.random.RandomState(0).shuffle(few)
    for round_ in range(1, 4):
        assert not rows.left_out(round_, [few.ravel()], 0)
    assert rows.left_out(4, [few.ravel()], 0) == leaves_out
    # Its 64 sampled rows are among 100.
    assert rows.why.startswith("by rows: " if leaves_out else "whole: ")


def test_a_dense_gradient_ends_it_within_two_rounds_and_is_seldom_looked_at() -> None:
    rows, out = rows_of(100), memoryview(bytearray(50_000))
    few, dense = np.zeros(10_000, np.float32), np.ones(10_000, np.float32)
    for round_ in range(1, 5):
        rows.left_out(round_, [few], 0)
    assert rows.leaves_out
    for round_ in range(5, 8):
        assert rows.left_out(round_, [dense], 0) == (round_ < 7)
        if rows.leaves_out:
            rows.encode(dense, Part(0, round_, round_), out)
    assert sum(rows.looks(round_) for round_ in range(8, 8 + 6400)) == 100


def test_the_sum_of_a_hosts_workers_counts() -> None:
    rows = rows_of(100, link_s=0.0)
    parts = np.zeros((2, 100, 100), np.float32)
    parts[0, :40] = parts[1, 60:] = 1
    for round_ in range(1, 5):
        rows.left_out(round_, [one.ravel() for one in parts], 0)
    assert rows.why.startswith("whole: 20%")


def test_rows_are_the_tensors_own_where_they_have_a_good_size() -> None:
    shapes = {(9, 32): 32, (9, 4, 5): 20, (9, 4): 128, (9,): 128, (): 128, (2, 5000): 128}
    assert {shape: row_elems(shape) for shape in shapes} == shapes


@given(
    st.sampled_from(["float16", "float32", "float64", "int8", "int64"]),
    st.sampled_from([8, 9, 32, 100, 128]),
    st.integers(0, 2000),
    st.integers(0, 300),
    st.sampled_from([0.0, 0.01, 0.5, 0.9, 1.0]),
    st.integers(0, 2**32 - 1),
)
def test_nothing_but_rows_of_zeros_is_left_out_and_none_that_has_changed(
    name: str, columns: int, length: int, offset: int, touched: float, seed: int
) -> None:
    random, dtype = np.random.RandomState(seed), np.dtype(name)
    some = random.random_sample(1 + (length + offset) // columns) < touched
    of_rows = np.repeat(some, columns)[offset : offset + length]
    elements = np.where(of_rows, random.standard_normal(length) * 9, 0).astype(dtype)
    if length and dtype.kind == "f":
        elements[random.randint(length)] = random.choice([-0.0, np.nan, np.inf])
    rows, part = rows_of(columns, name), Part(offset, 1, 1)
    rows.leaves_out = True
    codec = rows.codec
    memory = memoryview(bytearray(codec.most_bytes(length)))
    payload = memory[: rows.encode(elements, part, memory)]
    if touched == 0.01 and length > 1000:
        assert len(payload) < length * dtype.itemsize / 2
    out, total = np.ones(length, dtype), random.standard_normal(length).astype(dtype)
    with_it = total + elements
    codec.decode(payload, part, out)
    codec.add(payload, part, total)
    assert (out.tobytes(), total.tobytes()) == (elements.tobytes(), with_it.tobytes())
    # As a value, which the round has changed in these rows.
    before = random.standard_normal(length).astype(dtype)
    value = np.where(of_rows, elements, before).astype(dtype)
    payload = memory[: rows.encode_changes(before, value, part, memory)]
    codec.decoder(VALUES).decode(payload, part, before)
    assert before.tobytes() == value.tobytes()


@given(st.integers(0, 300), st.binary(max_size=1300), st.integers(0, 2000), st.integers(0, 2000))
def test_bytes_that_are_no_rows_are_refused(
    length: int, payload: bytes, row_bytes: int, head: int
) -> None:
    codec = Identity(length, np.dtype(np.float32))
    for ending in (b"", b"".join(n.to_bytes(4, "little") for n in (row_bytes, head))):
        out = np.zeros(length, np.float32)
        try:
            codec.decode(memoryview(payload + ending), Part(0, 1, 1), out)
        except ProtocolError as error:
            assert "without zero rows" in str(error)


# Whole jobs.

SETTINGS = {"P3KV_SLICE_SIZE": 3000}


@pytest.mark.parametrize("momentum", [pytest.param("0", marks=pytest.mark.long), "0.9"])
def test_mxnets_weights_are_those_of_one_process(momentum: str) -> None:
    result = run_job("zero_rows.py", [momentum], 2, 2, **SETTINGS)
    assert result.output.count("exact: whole: ") == 2, result.output


@NEEDS_TORCH
@pytest.mark.parametrize("momentum", ["0", pytest.param("0.9", marks=pytest.mark.long)])
def test_torchs_weights_are_those_of_one_process(momentum: str) -> None:
    result = torch_job("torch_zero_rows.py", momentum, **SETTINGS)
    assert result.output.count("exact: whole: ") == 2, result.output


def test_a_hosts_sum_travels_so_too() -> None:
    result = run_on_hosts(2, "zero_rows.py", "0", workers=2, P3KV_VERBOSE=1, **SETTINGS)
    assert result.output.count("exact: ") == 2, result.output
    assert re.search("gradients of .* travel by rows: 9", result.output), result.output


def test_a_setting_has_all_of_it_travel() -> None:
    result = run_job("zero_rows.py", ["0"], 2, 2, P3KV_LEAVE_ZERO_ROWS_OUT=0, **SETTINGS)
    assert "AssertionError: (4, " in result.output, result.output
