"""A step's parts: none is negative, together they are the step, and each is what it says."""

from __future__ import annotations

from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.server.stragglers import Readiness
from p3kv.wire.header import clock_us, passed_s
from p3kv.worker.step_times import (
    Delayed,
    Layer,
    Parts,
    ScriptTimes,
    ServerWork,
    Wait,
    forward_waits,
    parts_of_step,
)

seconds = st.floats(0.0, 100.0)
shares = st.floats(0.0, 1.0)
waits = st.lists(st.builds(Wait, seconds, seconds, seconds, seconds), max_size=5)
delays = st.builds(Delayed, shares, shares, shares)


@given(seconds, st.floats(-10.0, 100.0), waits, st.floats(-10.0, 100.0), delays)
def test_parts_are_not_negative_and_add_up(
    step_s: float, script_s: float, waits: List[Wait], longest_s: float, delayed: Delayed
) -> None:
    parts = parts_of_step(step_s, script_s, waits, longest_s, delayed)
    assert min(parts) >= -1e-9
    assert sum(parts) == pytest.approx(step_s)
    waited_s = parts.waiting_s + parts.straggler_s
    assert waited_s <= max(0.0, longest_s) + 1e-9
    assert waited_s <= sum(wait.seconds for wait in waits) + 1e-9


@given(st.builds(Wait, seconds, seconds, seconds, seconds))
def test_a_wait_is_all_used(wait: Wait) -> None:
    parts = wait.parts()
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(wait.seconds)


def test_a_wait_is_for_the_last_gradient_then_for_the_server_and_else_for_the_network() -> None:
    parts = Wait(10.0, 11.0, last_ready_s=10.5, worked_s=0.2).parts()
    assert parts == pytest.approx(Parts(straggler_s=0.5, server_s=0.2, network_s=0.3))
    assert Wait(10.0, 11.0, 9.0, 0.0).parts() == pytest.approx(Parts(network_s=1.0))
    assert Wait(10.0, 11.0, 30.0, 5.0).parts() == pytest.approx(Parts(straggler_s=1.0))


def test_a_forward_pass_waits_where_it_comes_before_a_value() -> None:
    layers = [Layer(0.0, 10.2, 0.0, 0), Layer(0.1, 10.25, 0.0, 0), Layer(0.2, 10.6, 0.0, 1)]
    found = forward_waits(10.0, layers, lambda server, begin_s, end_s: 0.25 * server)
    assert [wait[:2] for wait in found] == [
        pytest.approx((10.0, 10.2)), pytest.approx((10.4, 10.6))
    ]  # fmt: skip
    assert [wait.worked_s for wait in found] == [0.0, 0.25]
    assert forward_waits(11.0, layers, lambda *_: 0.0) == []


def test_what_had_no_processor_is_no_computing_and_a_script_that_sleeps_had_none_to_have() -> None:
    half = parts_of_step(1.0, 0.0, [], 0.0, Delayed(passes=0.5, script=0.5))
    assert half == pytest.approx(Parts(computing_s=0.5, processor_s=0.5))
    asleep = parts_of_step(1.0, 0.9, [], 0.0, Delayed(exchange=0.2))
    assert asleep == pytest.approx(Parts(computing_s=0.1, script_s=0.9))
    busy = parts_of_step(1.0, 0.9, [], 0.0, Delayed(passes=0.5, script=0.5))
    assert busy == pytest.approx(Parts(computing_s=0.0, script_s=0.5, processor_s=0.5))


def test_servers_work_evenly_between_what_their_values_say() -> None:
    work = ServerWork()
    work.note(0, 10.0, clock_us(4294.0))  # the clock is about to begin again
    work.note(0, 11.0, clock_us(4294.0 + 0.5))
    work.note(0, 11.5, clock_us(4294.0 + 0.4))  # a value that was overtaken
    work.note(0, 12.0, clock_us(4294.0 + 1.5))
    assert work.between(0, 10.0, 12.0) == pytest.approx(1.5, abs=1e-5)
    assert work.between(0, 10.5, 11.0) == pytest.approx(0.25, abs=1e-5)
    assert work.between(0, 12.0, 13.0) == work.between(1, 0.0, 99.0) == 0.0
    work.forget(11.2)
    work.note(0, 13.0, clock_us(4294.0 + 2.0))
    assert work.between(0, 11.5, 13.0) == pytest.approx(1.5, abs=1e-5)
    work.forget(99.0)
    work.note(0, 14.0, clock_us(4294.0 + 2.1))
    assert work.between(0, 13.0, 14.0) == pytest.approx(0.1, abs=1e-5)


def test_a_script_s_times_are_those_after_the_step_and_the_first_pass_counts() -> None:
    times = ScriptTimes()
    times.forward_begins(3, 10.0)
    times.forward_begins(3, 11.0)
    times.blocked(3, 9.0, 9.5)
    times.blocked(3, 9.6, 9.60001)  # nothing to wait for
    times.forward_begins(4, 12.0)
    assert times.take(3) == (10.0, [(9.0, 9.5)])
    assert times.take(3) == (0.0, [])
    assert times.take(4) == (12.0, [])


@given(st.lists(st.tuples(seconds, st.floats(0.0, 1.0)), min_size=2, max_size=20), seconds)
def test_when_a_gradient_was_ready_is_known_but_for_the_quickest_way(
    frames: List[tuple], ahead_s: float
) -> None:
    """Whatever the clocks show; and never later than it arrived."""
    readiness, quickest_s = Readiness(2), 1.0
    with pytest.MonkeyPatch.context() as patch:
        now = 0.0
        patch.setattr("p3kv.server.stragglers.now_s", lambda: now)
        for ready_s, way_s in sorted(frames):
            now = readiness._since_s + ready_s * 0.2 + way_s
            time_us = clock_us(now - way_s + ahead_s)
            found = readiness.ready_s(1, time_us)
            quickest_s = min(quickest_s, way_s)
            assert found == pytest.approx(now - way_s + quickest_s, abs=1e-5)


@given(st.floats(0.0, 1e6), st.floats(-1000.0, 1000.0))
def test_clocks_in_headers_tell_differences_also_where_they_begin_again(
    at_s: float, more_s: float
) -> None:
    later_s = max(0.0, at_s + more_s)
    assert passed_s(clock_us(at_s), clock_us(later_s)) == pytest.approx(later_s - at_s, abs=1e-5)
