"""Tensors cut into slices: nothing is lost, nothing is sent twice, no server gets more work."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from p3kv.slicing import cut, num_slices

sizes = st.integers(0, 5000)
slice_sizes = st.integers(1, 700)
servers = st.integers(1, 9)


@given(sizes, slice_sizes, st.integers(0, 8), servers)
def test_slices_cover_a_tensor_exactly_once(
    size: int, slice_size: int, first_server: int, num_servers: int
) -> None:
    slices = cut(size, slice_size, first_server, num_servers)
    elements = [e for s in slices for e in range(s.offset, s.offset + s.length)]
    assert elements == list(range(size))
    assert [s.index for s in slices] == list(range(len(slices)))


@given(sizes, slice_sizes)
def test_only_the_last_slice_is_short_and_none_is_empty(size: int, slice_size: int) -> None:
    lengths = [s.length for s in cut(size, slice_size, 0, 2)]
    assert all(length == slice_size for length in lengths[:-1])
    assert all(1 <= length <= slice_size for length in lengths[-1:])


@given(sizes, slice_sizes, servers)
def test_the_number_of_slices_is_known_without_cutting(
    size: int, slice_size: int, num_servers: int
) -> None:
    assert num_slices(size, slice_size) == len(cut(size, slice_size, 0, num_servers))


@given(st.lists(sizes, max_size=12), slice_sizes, servers)
def test_keys_one_after_the_other_go_round_robin_and_no_server_gets_two_slices_more(
    key_sizes: list, slice_size: int, num_servers: int
) -> None:
    placed: list = []
    for size in key_sizes:
        first_server = len(placed) % num_servers
        placed += [s.server for s in cut(size, slice_size, first_server, num_servers)]
    assert placed == [number % num_servers for number in range(len(placed))]
    load = Counter(placed)
    loads = [load[server] for server in range(num_servers)]
    assert max(loads) - min(loads) <= 1
