"""The simulator obeys the bounds and reproduces the paper's worked examples."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.models import load
from p3kv.report.forecast import bound
from p3kv.report.forecast.simulator import (
    BASELINE,
    EQUAL_PARTS,
    P3,
    P3KV,
    SLICING,
    Policy,
    Workload,
    cut,
    simulate,
)

GIGABYTE_S = 8e9  # a link, in bits a second, that carries 1e9 bytes a second
WHOLE_LAYERS = Policy(slice_elems=None, priority=False, pulls=False, split_elems=10**12)


def _bounds(model, hosts, link_bit_s):
    arguments = (model.layer_bytes, model.forward_s, model.backward_s, hosts, link_bit_s)
    return bound.lower_bound_s(*arguments), bound.ideal_fifo_s(*arguments)


def _steady(result):
    return statistics.mean(result.iteration_s[2:])


# Bounds


def test_the_bounds_of_resnet50_at_one_gigabit():
    """Worked out by hand: 102.3 MB, of which 6/4 / (1e9 * 0.957 / 8) s are wire time."""
    model = load("resnet50")
    wire_s = bound.wire_time_s(model.size_bytes, 4, 1e9)
    assert wire_s == pytest.approx(102_303_648 * 12 / 0.957e9)
    lower_s, fifo_s = _bounds(model, 4, 1e9)
    assert lower_s == pytest.approx(1.283, abs=0.001)  # all bytes, after which no layer is left
    assert fifo_s == pytest.approx(1.690, abs=0.001)
    assert bound.efficiency(model.compute_s, lower_s) == pytest.approx(0.951, abs=0.001)


def test_the_link_for_a_ratio_gives_that_ratio():
    link_bit_s = bound.link_for_ratio_bit_s(1.5, 2.0, 1e8, 4)
    assert bound.wire_time_s(1e8, 4, link_bit_s) / 2.0 == pytest.approx(1.5)


_SECONDS = st.floats(0.001, 1.0)
_LAYERS = st.lists(
    st.tuples(st.integers(1, 400_000), _SECONDS, _SECONDS), min_size=1, max_size=8
).map(lambda layers: [list(column) for column in zip(*layers)])


@given(_LAYERS, st.integers(1, 64), st.floats(1e6, 1e9))
def test_bounds_lie_between_what_must_and_what_need_not_be_waited_for(layers, hosts, link_bit_s):
    elems, forward_s, backward_s = layers
    sizes = [4 * count for count in elems]
    arguments = (sizes, forward_s, backward_s, hosts, link_bit_s)
    compute_s = sum(forward_s) + sum(backward_s)
    wire_s = bound.wire_time_s(sum(sizes), hosts, link_bit_s)
    lower_s, fifo_s = bound.lower_bound_s(*arguments), bound.ideal_fifo_s(*arguments)
    slack = 1 + 1e-9
    assert max(compute_s, wire_s) <= lower_s * slack
    assert lower_s <= fifo_s * slack
    assert fifo_s <= (compute_s + wire_s) * slack
    assert fifo_s - lower_s <= sum(forward_s) * slack
    faster = (*arguments[:-1], link_bit_s * 2)
    assert bound.lower_bound_s(*faster) <= lower_s * slack


# Simulation against the bounds


@settings(max_examples=60, deadline=None)
@given(_LAYERS, st.integers(2, 16), st.floats(1e6, 1e9), st.sampled_from([BASELINE, SLICING, P3]))
def test_no_policy_beats_the_bound(layers, hosts, link_bit_s, policy):
    elems, forward_s, backward_s = layers
    workload = Workload([[(0, count)] for count in elems], forward_s, backward_s)
    result = simulate(workload, policy, hosts, link_bit_s, symmetric=True)
    sizes = [4 * count for count in elems]
    lower_s = bound.lower_bound_s(sizes, forward_s, backward_s, hosts, link_bit_s)
    assert min(result.iteration_s[1:]) >= lower_s * (1 - 1e-9)
    assert result.iteration_s[0] == pytest.approx(sum(forward_s) + sum(backward_s))


@pytest.mark.parametrize("name", ["resnet50", "inception_v3", "vgg19", "sockeye"])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.4])
def test_four_hosts_are_ordered_as_in_the_paper(name, ratio):
    model = load(name)
    link_bit_s = bound.link_for_ratio_bit_s(ratio, model.compute_s, model.size_bytes, 4)
    workload = model.workload
    baseline_s, slicing_s, p3_s, p3kv_s = (
        _steady(simulate(workload, policy, 4, link_bit_s, iterations=6))
        for policy in (BASELINE, SLICING, P3, P3KV)
    )
    lower_s, fifo_s = _bounds(model, 4, link_bit_s)
    assert lower_s * 0.999 <= min(p3_s, p3kv_s)
    assert max(p3_s, p3kv_s) < lower_s * 1.05
    assert fifo_s * 0.999 <= slicing_s < fifo_s * 1.02
    assert fifo_s * 0.999 <= baseline_s < fifo_s * 1.2
    assert p3_s <= slicing_s <= baseline_s


def test_p3_is_near_the_bound_where_wire_and_computation_take_as_long():
    model = load("resnet50")
    link_bit_s = bound.link_for_ratio_bit_s(1.0, model.compute_s, model.size_bytes, 4)
    lower_s, _ = _bounds(model, 4, link_bit_s)
    for policy, slack in ((P3, 1.04), (P3KV, 1.02)):
        assert _steady(simulate(model.workload, policy, 4, link_bit_s)) < lower_s * slack


@pytest.mark.parametrize(
    ("name", "hosts", "ratio"), [("vgg19", 4, 2.0), ("inception_v3", 4, 2.0), ("resnet50", 16, 1.3)]
)
def test_a_worker_that_lags_starves_unless_its_round_goes_first(name, hosts, ratio):
    """The slowest worker falls an iteration behind when others' early layers pass its last ones."""
    model = load(name)
    workload = model.workload
    link_bit_s = bound.link_for_ratio_bit_s(ratio, model.compute_s, model.size_bytes, hosts)
    lower_s, _ = _bounds(model, hosts, link_bit_s)
    by_layer_s, oldest_first_s, even_too_s = (
        max(simulate(workload, policy, hosts, link_bit_s, iterations=6).iteration_s[1:])
        for policy in (P3, P3._replace(oldest_round_first=True), P3KV)
    )
    assert by_layer_s > 1.4 * lower_s
    assert oldest_first_s < 1.1 * lower_s
    assert even_too_s < 1.05 * lower_s


def test_equal_parts_that_workers_push_in_turn_keep_many_links_busy():
    """32 hosts; a layer has a quarter of a slice of 50,000 elements for each server."""
    hosts, layers = 32, 16
    workload = Workload(
        [[(key, 400_000)] for key in range(layers)], [1 / 48] * layers, [2 / 48] * layers
    )
    size_bytes = sum(workload.layer_bytes)
    link_bit_s = bound.link_for_ratio_bit_s(1.2, workload.compute_s, size_bytes, hosts)
    times = (workload.layer_bytes, workload.forward_s, workload.backward_s)
    lower_s = bound.lower_bound_s(*times, hosts, link_bit_s)
    parts_s, at_once_s, slices_s = (
        _steady(simulate(workload, policy, hosts, link_bit_s))
        for policy in (
            EQUAL_PARTS,
            EQUAL_PARTS._replace(next_slice_first=False),
            P3KV,
        )
    )
    assert parts_s < 1.01 * lower_s
    assert at_once_s > 1.03 * parts_s
    assert slices_s > 1.04 * parts_s


def test_256_equal_hosts_take_as_long_to_simulate_as_four():
    model = load("resnet50")
    workload = model.workload
    lower_s, fifo_s = _bounds(model, 256, 1e9)
    took_s = []
    for hosts in (4, 256):
        started_s = time.process_time()
        p3_s = _steady(simulate(workload, P3, hosts, 1e9, symmetric=True))
        fifo = _steady(simulate(workload, SLICING, hosts, 1e9, symmetric=True))
        took_s.append(time.process_time() - started_s)
    assert took_s[1] < 5 * took_s[0]
    assert p3_s == pytest.approx(lower_s, rel=0.002)
    assert fifo == pytest.approx(fifo_s, rel=0.002)


# The paper's worked examples


def test_figure_4_priority_halves_the_delay_between_iterations():
    """Three layers, each pass one unit, each layer's synchronisation two units of the wire."""
    workload = Workload([[(0, 500_000_000)]] * 3, [1, 1, 1], [1, 1, 1])
    delays = {}
    for policy in (WHOLE_LAYERS, WHOLE_LAYERS._replace(priority=True)):
        result = simulate(workload, policy, 2, GIGABYTE_S, payload=1, symmetric=True, timeline=True)
        spans = [event for event in result.timeline if event.lane == "compute"]
        end_s = next(e.end_s for e in spans if (e.kind, e.layer) == ("backward", 0))
        start_s = next(
            e.start_s for e in spans if (e.kind, e.layer, e.iteration) == ("forward", 0, 1)
        )
        delays[policy.priority] = start_s - end_s
    assert delays[False] == pytest.approx(4)  # twice the first layer's synchronisation
    assert delays[True] == pytest.approx(2)


def test_figure_6_slicing_reduces_the_communication_by_a_third():
    """The middle layer is three times as heavy; gradients, updates and parameters go one way each.

    From the first gradient to the last parameter: eleven units against seven. The paper says
    30 %.
    """
    unit = 250_000_000
    workload = Workload([[(0, unit)], [(0, 3 * unit)], [(0, unit)]], [1, 1, 1], [1, 1, 1])
    taken_s = []
    for policy in (WHOLE_LAYERS, WHOLE_LAYERS._replace(slice_elems=unit)):
        result = simulate(
            workload,
            policy,
            hosts=1,
            link_bit_s=GIGABYTE_S,
            iterations=1,
            payload=1,
            dedicated_servers=True,
            update_s_per_byte=1e-9,
            timeline=True,
        )
        network = [event for event in result.timeline if event.lane != "compute"]
        taken_s.append(network[-1].end_s - min(event.start_s for event in network))
    assert taken_s == pytest.approx([11, 7])


# The simulator itself


@pytest.mark.parametrize("policy", [BASELINE, SLICING, P3, P3KV])
def test_a_link_carries_one_message_at_a_time_and_all_of_them(policy):
    model = load("resnet50")
    result = simulate(model.workload, policy, 4, 1e9, iterations=3, timeline=True)
    for lane in ("compute", "up", "down"):
        events = sorted(
            (event for event in result.timeline if event.lane == lane), key=lambda e: e.start_s
        )
        for before, after in zip(events, events[1:]):
            assert after.start_s >= before.end_s - 1e-9
    busy_s = sum(event.end_s - event.start_s for event in result.timeline if event.lane == "up")
    wire_s = bound.wire_time_s(model.size_bytes, 4, 1e9)
    assert busy_s / 3 == pytest.approx(wire_s, rel=0.1)  # host 0's share of the servers' load


def test_pulls_wait_for_the_whole_array():
    workload = Workload([[(0, 4_000_000)]], [0.1], [0.1])
    cut_up = Policy(slice_elems=None, priority=False, pulls=False)
    at_once, asked = (
        _steady(simulate(workload, policy, 4, 1e9, pull_s=0.02))
        for policy in (cut_up, cut_up._replace(pulls=True))
    )
    assert asked >= at_once + 0.02


def test_slices_cover_each_array_once():
    workload = Workload([[(0, 120_001), (1, 7)], [(2, 50_000)]], [1, 1], [1, 1])
    messages = cut(workload, P3, 3)
    assert [message.size_bytes / 4 for message in messages] == [50_000, 50_000, 20_001, 7, 50_000]
    assert [message.server for message in messages] == [0, 1, 2, 0, 1]
    assert [message.array for message in messages] == [0, 0, 0, 1, 2]
    assert [message.server for message in cut(workload, P3KV, 3)] == [0, 1, 2, 1, 2]


def test_big_arrays_are_split_over_all_servers_and_others_go_to_one():
    workload = Workload([[(5, 1_000_000)], [(6, 1_000_001)]], [1, 1], [1, 1])
    messages = cut(workload, BASELINE, 4)
    assert [message.server for message in messages] == [5 * 9973 % 4, 0, 1, 2, 3]
    assert messages[1].size_bytes == pytest.approx(1_000_001)


def test_symmetric_hosts_cannot_have_servers_elsewhere():
    with pytest.raises(ValueError, match="symmetric"):
        simulate(Workload([[(0, 1)]], [1], [1]), P3, 2, 1e9, symmetric=True, dedicated_servers=True)
