"""Tensors cut into slices: nothing is lost, nothing is sent twice, no server gets more work."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.slicing import credit_bytes, cut, loads_with, slice_size_for
from p3kv.slicing.size import FEWEST_ELEMS, MOST_ELEMS

sizes = st.integers(0, 5000)
slice_sizes = st.integers(1, 700)
servers = st.lists(st.integers(0, 10_000), min_size=1, max_size=9)


@given(sizes, slice_sizes, servers)
def test_slices_cover_a_tensor_exactly_once(size: int, slice_size: int, loads: List[int]) -> None:
    slices = cut(size, slice_size, loads)
    elements = [e for s in slices for e in range(s.offset, s.offset + s.length)]
    assert elements == list(range(size))
    assert [s.index for s in slices] == list(range(len(slices)))


@given(sizes, slice_sizes)
def test_only_the_last_slice_is_short_and_none_is_empty(size: int, slice_size: int) -> None:
    lengths = [s.length for s in cut(size, slice_size, [0, 0])]
    assert all(length == slice_size for length in lengths[:-1])
    assert all(1 <= length <= slice_size for length in lengths[-1:])


@given(sizes, slice_sizes, servers)
def test_loads_count_every_element_once(size: int, slice_size: int, loads: List[int]) -> None:
    after = loads_with(loads, cut(size, slice_size, loads))
    assert sum(after) == sum(loads) + size
    assert all(now >= before for now, before in zip(after, loads))


@given(st.lists(sizes, max_size=12), slice_sizes, st.integers(1, 9))
def test_after_any_keys_no_server_has_a_slice_more_than_another(
    key_sizes: List[int], slice_size: int, num_servers: int
) -> None:
    loads = [0] * num_servers
    for size in key_sizes:
        loads = loads_with(loads, cut(size, slice_size, loads))
        assert max(loads) - min(loads) <= slice_size


@given(st.integers(0, 50), st.integers(1, 9))
def test_full_slices_go_round_robin(count: int, num_servers: int) -> None:
    slices = cut(count * 10, 10, [0] * num_servers)
    assert [s.server for s in slices] == [index % num_servers for index in range(count)]


@pytest.mark.parametrize(
    ("rate_mbit_s", "elems"),
    [(1, 25_000), (100, 25_000), (450, 50_000), (1000, 100_000), (2000, 200_000), (1e6, 400_000)],
)
def test_slices_take_about_as_long_on_every_network(rate_mbit_s: float, elems: int) -> None:
    assert slice_size_for(rate_mbit_s * 1e6 / 8) == elems


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_faster_network_never_gets_smaller_slices(one: float, other: float) -> None:
    slower, faster = sorted((one, other))
    assert FEWEST_ELEMS <= slice_size_for(slower) <= slice_size_for(faster) <= MOST_ELEMS


@given(st.integers(1, 2**28))
def test_the_kernel_holds_less_than_a_slice_of_each_connection_or_little(slice_size: int) -> None:
    assert 96 * 1024 <= credit_bytes(slice_size) <= max(96 * 1024, slice_size * 4)
