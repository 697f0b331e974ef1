"""Tensors cut into slices: nothing is lost, nothing is sent twice, no server gets more work."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from own_layout import WholeRows
from p3kv.slicing import (
    Layout,
    Run,
    balanced_runs,
    cut,
    gradient_credit_bytes,
    loads_with,
    patient_sizes,
    slice_size_for,
    value_credit_bytes,
)
from p3kv.slicing.size import SIZES_ELEMS
from p3kv.slicing.slices import Dense

sizes = st.integers(0, 5000)
layouts = st.builds(Dense, st.tuples(sizes)) | st.builds(
    WholeRows, st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 40))
)
slice_sizes = st.integers(1, 700)
servers = st.lists(st.integers(0, 10_000), min_size=1, max_size=9)


def placed(layout: Layout, slice_size: int, loads: List[int]) -> List[Run]:
    full = layout.full_slice_elems(slice_size)
    return balanced_runs(layout.size_elems, full, loads, grain_elems=layout.grain_elems)


@given(layouts, slice_sizes, servers, slice_sizes)
def test_slices_cover_a_tensor_exactly_once_whatever_their_size(
    layout: Layout, slice_size: int, loads: List[int], later_size: int
) -> None:
    runs = placed(layout, slice_size, loads)
    owners = {}
    for elems in (slice_size, later_size):
        slices = layout.slices(runs, elems)
        assert [s.index for s in slices] == list(range(len(slices)))
        assert all(1 <= s.length <= max(elems, layout.grain_elems) for s in slices)
        covered = {e: s.server for s in slices for e in range(s.offset, s.offset + s.length)}
        assert sum(s.length for s in slices) == len(covered) == layout.size_elems
        # Where an element is kept does not change.
        owners = owners or covered
        assert covered == owners


@given(layouts, slice_sizes, slice_sizes, servers)
def test_a_servers_slices_are_one_run_in_order(
    layout: Layout, slice_size: int, later_size: int, loads: List[int]
) -> None:
    runs = placed(layout, slice_size, loads)
    slices = layout.slices(runs, later_size)
    for server in range(len(loads)):
        mine = [s for s in slices if s.server == server]
        ends = [s.offset + s.length for s in mine]
        assert [s.offset for s in mine[1:]] == ends[:-1]


@given(sizes, slice_sizes, servers)
def test_loads_count_every_element_once(size: int, slice_size: int, loads: List[int]) -> None:
    runs = balanced_runs(size, slice_size, loads)
    after = loads_with(loads, runs)
    kept = [0] * len(loads)
    for piece in cut(runs, slice_size):
        kept[piece.server] += piece.length
    assert after == [before + more for before, more in zip(loads, kept)]


@given(st.lists(sizes, max_size=12), slice_sizes, st.integers(1, 9))
def test_after_any_keys_no_server_has_a_slice_more_than_another(
    key_sizes: List[int], slice_size: int, num_servers: int
) -> None:
    loads = [0] * num_servers
    for size in key_sizes:
        loads = loads_with(loads, balanced_runs(size, slice_size, loads))
        assert max(loads) - min(loads) <= slice_size


@pytest.mark.parametrize(
    ("size", "loads", "parts"),
    [
        (65_536, [0] * 8, [8_192] * 8),  # three slices: five links would idle
        (524_288, [0] * 8, [65_536] * 8),  # and 21 are three for some, two for others
        (100_001, [25_000, 0, 10, 10], [25_000, 25_001, 25_000, 25_000]),
        (100_000, [0] * 17, [25_000] * 4),  # less than a quarter for each
        (25_000, [0] * 2, [25_000]),  # a slice travels whole
        (100_000, [90_000, 0, 0, 0], [50_000, 25_000, 25_000]),  # fills up first
    ],
)
def test_a_tensor_is_in_even_parts_where_each_is_worth_a_frame(
    size: int, loads: List[int], parts: List[int]
) -> None:
    runs = balanced_runs(size, 25_000, loads)
    assert sorted(length for _, length in runs) == sorted(parts)


@given(st.integers(0, 50), st.integers(1, 9))
def test_slices_go_from_server_to_server_in_turn(count: int, num_servers: int) -> None:
    runs = balanced_runs(count * 10 * num_servers, 10, [0] * num_servers)
    slices = cut(runs, 10)
    assert [s.server for s in slices] == [i % num_servers for i in range(count * num_servers)]


@given(st.floats(12e6, 8e9))
def test_slices_take_some_milliseconds_on_every_usual_network(rate_bit_s: float) -> None:
    slice_bits = slice_size_for(rate_bit_s / 8, servers=4) * 32
    assert 0.001 <= slice_bits / rate_bit_s <= (0.006 if rate_bit_s > 150e6 else 0.009)


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_faster_network_never_gets_smaller_slices(one: float, other: float) -> None:
    slower, faster = (slice_size_for(rate, servers=4) for rate in sorted((one, other)))
    assert min(SIZES_ELEMS.values()) <= slower <= faster <= max(SIZES_ELEMS.values())


@given(st.floats(0.8, 1.12))
def test_usual_links_get_the_same_size_however_they_are_measured(off: float) -> None:
    assert slice_size_for(off * 125e6, servers=4) == 50_000
    assert slice_size_for(off * 312.5e6, servers=4) == 200_000


@given(st.floats(0, 1e12), st.integers(8, 200))
def test_what_a_server_sends_of_a_slice_does_not_grow_with_many_hosts(
    rate_bytes_s: float, hosts: int
) -> None:
    few, many = slice_size_for(rate_bytes_s, servers=8), slice_size_for(rate_bytes_s, hosts)
    assert 0 < hosts * many <= 8 * max(few, 25_000)


@given(st.floats(50e6, 8e9), st.integers(0, 10**9), st.integers(2, 16))
@example(200e6, 10**9, 4)
def test_where_all_wait_slices_are_as_large_or_larger_and_a_step_has_many(
    rate_bit_s: float, elems: int, hosts: int
) -> None:
    size = slice_size_for(rate_bit_s / 8, hosts)
    patient, for_credit = patient_sizes(rate_bit_s / 8, elems, hosts)
    assert size <= for_credit <= patient <= max(size, 200_000, for_credit)
    assert patient == size or patient * 128 <= elems
    credits_bytes = (c(for_credit, hosts) for c in (gradient_credit_bytes, value_credit_bytes))
    assert (hosts - 1) * sum(credits_bytes) <= 0.1 * rate_bit_s / 8


@given(st.integers(1, 2**28), st.integers(1, 200))
def test_the_kernel_holds_a_slice_of_each_connection_at_most_or_little(
    slice_size: int, peers: int
) -> None:
    gradients = gradient_credit_bytes(slice_size, peers)
    values = value_credit_bytes(slice_size, peers)
    assert 8 * 1024 <= gradients <= values <= max(288 * 1024, slice_size * 4)
    assert values >= 2 * gradients - 1 or peers > 4


@given(st.integers(1, 2**28), st.integers(4, 200))
def test_many_peers_share_what_may_be_under_way(slice_size: int, peers: int) -> None:
    for credit_bytes in (gradient_credit_bytes, value_credit_bytes):
        together = peers * credit_bytes(slice_size, peers)
        assert together <= max(4 * credit_bytes(slice_size, 4), peers * 8 * 1024)


@given(st.floats(100e6, 100e9), st.integers(2, 16))
def test_all_credits_for_a_link_take_it_50_ms_at_most(rate_bit_s: float, hosts: int) -> None:
    """Much more would be lost where it waits, in the queue of a switch's port. The kernel goes by
    what buffers occupy, and takes a write of up to 64 KiB whole, so that it may hold more."""
    slice_size = slice_size_for(rate_bit_s / 8, hosts)
    credits_bytes = (c(slice_size, hosts) for c in (gradient_credit_bytes, value_credit_bytes))
    assert (hosts - 1) * sum(credits_bytes) <= 0.05 * rate_bit_s / 8
