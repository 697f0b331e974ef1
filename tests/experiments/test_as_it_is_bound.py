"""The least time of a script's step is that of the forecasts where the script is plain."""

from __future__ import annotations

from typing import List

import pytest

from experiments.as_it_is.bound import GRADIENT, NORM, READ, Event, bound_s
from p3kv.report.forecast.bound import ideal_fifo_s, lower_bound_s, wire_time_s

SIZES = [400_000, 100_000, 1_000_000, 50_000]
FORWARD_S, BACKWARD_S = [0.02, 0.05, 0.01, 0.03], [0.04, 0.08, 0.03, 0.05]
COMPUTE_S, HOSTS = sum(FORWARD_S) + sum(BACKWARD_S), 4


def events() -> List[Event]:
    layers = list(enumerate(zip(SIZES, FORWARD_S, BACKWARD_S)))
    forward = [Event(READ, number, size, seconds) for number, (size, seconds, _) in layers]
    backward = [Event(GRADIENT, number, size, seconds) for number, (size, _, seconds) in layers]
    return forward + backward[::-1]


@pytest.mark.parametrize("mbit_s", [10, 60, 150, 1000])
def test_a_plain_step_s_bounds_are_those_of_the_forecasts(mbit_s: int) -> None:
    network = (HOSTS, mbit_s * 1e6)
    of_layers = (SIZES, FORWARD_S, BACKWARD_S, *network)
    assert bound_s(events(), COMPUTE_S, *network, by_servers=True) == pytest.approx(
        lower_bound_s(*of_layers)
    )
    assert bound_s(events(), COMPUTE_S, *network, by_servers=False) == pytest.approx(
        ideal_fifo_s(*of_layers)
    )


def test_what_a_script_waits_for_makes_steps_longer() -> None:
    network = (HOSTS, 100e6)
    plain_s = bound_s(events(), COMPUTE_S, *network, by_servers=True)
    clipped_s = bound_s([*events(), Event(NORM)], COMPUTE_S, *network, by_servers=True)
    reads = [Event(READ, number, size) for number, size in enumerate(SIZES)]
    read_s = bound_s([*events(), *reads], COMPUTE_S, *network, by_servers=True)
    assert plain_s < clipped_s
    # All values of the step have come before the next one begins.
    assert read_s == pytest.approx(bound_s(events(), COMPUTE_S, *network, by_servers=False))
    both_s = bound_s([*events(), Event(NORM), *reads], COMPUTE_S, *network, by_servers=True)
    values_s = wire_time_s(sum(SIZES), *network) / 2
    assert both_s >= COMPUTE_S + values_s


def test_gradients_that_add_up_travel_once_in_a_step() -> None:
    network = (HOSTS, 100e6)
    once_s = bound_s(events(), COMPUTE_S, *network, by_servers=True)
    twice_s = bound_s(events() * 2, 2 * COMPUTE_S, *network, by_servers=True)
    assert twice_s == pytest.approx(once_s + COMPUTE_S)  # nothing may leave in the first pass
