"""Pipelines compute every batch once each way, in DualPipe's and PipeDream's order and time."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.dualpipe import __main__ as command
from experiments.dualpipe import comparison, plans
from experiments.dualpipe.partition import Stage, partition
from experiments.dualpipe.pipeline import batch_s, simulate
from experiments.dualpipe.plans import BACKWARD, FORWARD, Step
from experiments.models import load
from p3kv.report.forecast import Layer, Model, Parameter
from tests.experiments.pictures import assert_is_picture

workers = st.integers(1, 6)
batches = st.integers(1, 20)
seconds = st.integers(1, 9)


def _in_units(workers, batches):
    return plans.in_units(plans.one_forward_one_backward(workers, batches))


def _far_ahead(workers, batches):
    return plans.one_forward_one_backward(workers, batches, ahead=2)


make_plan = st.sampled_from([plans.dualpipe, plans.one_forward_one_backward, _far_ahead, _in_units])
make_stages = st.lists(
    st.builds(Stage, st.just(1), seconds, seconds, st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


@given(make_plan, workers, batches)
def test_every_batch_passes_every_stage_once_in_each_direction(make, workers, batches):
    passes = [(kind, batch) for kind in (FORWARD, BACKWARD) for batch in range(batches)]
    for steps in make(workers, batches):
        assert Counter((step.kind, step.batch) for step in steps) == Counter(passes)


@given(make_plan, make_stages, batches)
def test_no_worker_does_two_things_at_once_and_none_before_its_input_is_there(
    make, stages, batches
):
    workers, rate = len(stages), 2.0
    done = simulate(make(workers, batches), stages, rate)
    assert len(done) == 2 * workers * batches
    ends = {(one.step.kind, one.worker, one.step.batch): one.end_s for one in done}
    free, unit_ends = [0.0] * workers, {}
    for worker, step, start_s, end_s in done:
        assert end_s - start_s == stages[worker][1 if step.kind == FORWARD else 2]
        assert start_s >= free[worker]
        free[worker] = end_s
        unit_ends[step.unit] = max(end_s, unit_ends.get(step.unit, 0.0))
        source = plans.input_of(step.kind, worker, step.batch, workers)
        if source is not None:
            sent = stages[min(worker, source[1])].activation_bytes * (worker != source[1])
            assert start_s >= ends[source] + sent / rate
    for _, step, start_s, _ in done:
        assert all(start_s >= end for unit, end in unit_ends.items() if unit < step.unit)


@given(
    st.sampled_from([plans.dualpipe, plans.one_forward_one_backward]),
    workers, batches, seconds, seconds,
)  # fmt: skip
def test_equal_stages_idle_as_long_as_one_batch_takes_through_the_others(
    make, workers, batches, forward_s, backward_s
):
    """The known bubble of 1F1B: (N - 1)(f + b)."""
    stages = [Stage(1, forward_s, backward_s, 0)] * workers
    done = simulate(make(workers, batches), stages, math.inf)
    assert done[-1].end_s == (batches + workers - 1) * (forward_s + backward_s)


@given(workers, batches)
def test_dualpipes_order_is_1f1bs_with_twice_as_many_batches_ahead(workers, batches):
    ordered = [[s._replace(unit=0) for s in steps] for steps in plans.dualpipe(workers, batches)]
    assert ordered == plans.one_forward_one_backward(workers, batches, ahead=2)


@given(workers)
def test_equations_5_and_6_count_updates_until_the_round_trip_ends(workers):
    """And at worker k, k of these come after its own update."""
    batches = 6 * workers
    batch, plan = 3 * workers, plans.dualpipe(workers, batches)
    (completes,) = (s.unit for s in plan[0] if (s.kind, s.batch) == (BACKWARD, batch))
    for worker, steps in enumerate(plan):
        for kind in (FORWARD, BACKWARD):
            (used,) = (s.unit for s in steps if (s.kind, s.batch) == (kind, batch))
            updates = sum(s.kind == BACKWARD and used <= s.unit < completes for s in steps)
            assert updates == plans.version_difference(kind, worker, workers)
        own = plans.staleness(plan, worker, batch)
        assert own == plans.version_difference(FORWARD, worker, workers) - worker
        in_turn = plans.one_forward_one_backward(workers, batches)
        assert plans.staleness(in_turn, worker, batch) == workers - 1 - worker


def test_the_fifth_batch_takes_figure_8s_way():
    """Three workers: from time unit 5 to 9, and W_5 to W_9."""
    way = [
        (step.unit, worker, step.kind)
        for worker, steps in enumerate(plans.dualpipe(3, 20))
        for step in steps
        if step.batch == 5
    ]
    assert sorted(way) == [
        (5, 0, FORWARD),
        (6, 1, FORWARD),
        (7, 2, BACKWARD),
        (7, 2, FORWARD),
        (8, 1, BACKWARD),
        (9, 0, BACKWARD),
    ]
    assert plans.version_difference(FORWARD, 0, 3) == 4


def test_time_units_have_one_step_of_pipedream_and_two_of_dualpipe():
    for make, most in ((_in_units, 1), (plans.dualpipe, 2)):
        for steps in make(4, 30):
            assert max(Counter(step.unit for step in steps).values()) == most
    assert _in_units(2, 2)[1] == [
        Step(1, FORWARD, 0),
        Step(2, BACKWARD, 0),
        Step(3, FORWARD, 1),
        Step(4, BACKWARD, 1),
    ]


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=6))
def test_dualpipe_is_less_than_twice_as_fast_as_pipedream_in_time_units(times):
    stages = [Stage(1, forward_s, backward_s, 0) for forward_s, backward_s in times]
    found = comparison.pipelines(len(stages))
    slowest_s = max(map(sum, times))
    alone = {name: batch_s(plan, stages, math.inf) for name, plan in found.items()}
    assert alone["dualpipe"] == alone["pipedream"] == alone["dualpipe_free"] == slowest_s
    assert slowest_s <= alone["pipedream_units"] < 2 * slowest_s


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_transfers_delay_1f1b_and_hide_behind_dualpipes_passes(workers):
    """N batches are under way in 1F1B, and a round trip has 2(N - 1) transfers."""
    stages = [Stage(1, 1.0, 2.0, 1)] * workers
    found = comparison.pipelines(workers)
    assert batch_s(found["dualpipe"], stages, 4.0) == 3
    expected_s = 3 + 2 * (workers - 1) / 4 / workers
    assert batch_s(found["pipedream"], stages, 4.0) == pytest.approx(expected_s)


def _model(times, crossing):
    parameter = Parameter("p", (1,))
    layers = tuple(Layer("l", (parameter,), t, c) for t, c in zip(times, [*crossing, 0]))
    return Model("random", 1, float(sum(times)), layers, ())


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=7), st.data())
def test_no_other_partition_has_a_faster_slowest_stage_or_cut(layers, data):
    workers = data.draw(st.integers(1, len(layers)))
    times, crossing = zip(*layers)
    model = _model(times, crossing[:-1])
    rate = 8.0

    def slowest_s(ends):
        passes = [sum(times[a:b]) for a, b in zip((0, *ends), (*ends, len(times)))]
        return max(*passes, *(2 * 4 * crossing[end - 1] / rate for end in ends), 0)

    found = partition(model, workers, rate)
    ends = [*itertools.accumulate(stage.layers for stage in found)]
    others = itertools.combinations(range(1, len(times)), workers - 1)
    assert len(found) == workers and ends[-1] == len(times)
    assert slowest_s(ends[:-1]) == pytest.approx(min(map(slowest_s, others)))
    assert sum(s.forward_s + s.backward_s for s in found) == pytest.approx(model.compute_s)


def test_more_workers_than_layers_are_refused():
    with pytest.raises(ValueError, match="has 2 layers, which 3 workers"):
        partition(_model((1, 1), (1,)), 3, 1.0)


def test_an_snn_sends_the_papers_largest_ratio_of_bytes():
    """528 times less than data parallelism (section 2.3), here for one layer more."""
    row = comparison.compare(load("snn"), 4, 1 / 16)
    assert row["pipeline_bytes"] == 2 * 3 * 128 * 2048 * 4
    assert row["data_parallel_bytes"] / row["pipeline_bytes"] == pytest.approx(528, rel=0.02)
    for system in row["systems"].values():
        parts = [system[part] for part in ("compute_s", "transfer_s", "imbalance_s")]
        assert min(parts) > -1e-9
        assert system["speed_up"] == pytest.approx(row["compute_s"] / sum(parts))


def test_the_command_leaves_numbers_and_pictures(tmp_path):
    command.main(["--quick", "--models", "vgg19", "--output", str(tmp_path)])
    for name in ("timelines", "transfers", "throughput", "breakdown", "links"):
        assert json.loads((tmp_path / f"dualpipe_{name}-quick.json").read_text())
        assert_is_picture(tmp_path / f"dualpipe_{name}-quick.png")
