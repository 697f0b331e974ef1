"""The thesis's figures: placements do what its text says, and recorded runs are told right."""

from __future__ import annotations

import pytest

from experiments.campaign.placing import loads_elems
from experiments.campaign.records import Records
from experiments.drawing import by_optimization, by_placement, curves
from experiments.drawing.by_placement import COMPARED, HOSTS, RATIOS, most_speed_up, variation
from experiments.emulation.placements import UniformSplit, WholeRoundRobin
from experiments.models import THESIS_MODELS, load
from p3kv.slicing.layout import Dense, TouchedRows
from p3kv.slicing.placement import checked
from p3kv.slicing.topology import Topology
from tests.experiments.pictures import assert_is_picture

_HOSTS = Topology(tuple("abcd"), tuple("abcd"))


def _placed(placement, layout, servers=4):
    runs = placement.place(layout, 100, [0] * servers, _HOSTS)
    return checked(runs, layout, servers)


def test_a_uniform_split_gives_every_server_an_equal_part():
    assert _placed(UniformSplit(), Dense((8, 2))) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert _placed(UniformSplit(), Dense((10,))) == [(0, 3), (1, 3), (2, 2), (3, 2)]
    assert _placed(UniformSplit(), Dense((3,))) == [(0, 1), (1, 1), (2, 1)]
    assert _placed(UniformSplit(), Dense((0,))) == []


def test_a_uniform_split_keeps_rows_whole():
    assert _placed(UniformSplit(), TouchedRows((6, 5))) == [(0, 10), (1, 10), (2, 5), (3, 5)]


def test_round_robin_gives_whole_tensors_to_one_server_after_the_other():
    placement = WholeRoundRobin()
    sizes = (7, 1, 400, 3, 9)
    assert [_placed(placement, Dense((size,)), 3) for size in sizes] == [
        [(0, 7)], [(1, 1)], [(2, 400)], [(0, 3)], [(1, 9)]
    ]  # fmt: skip


@pytest.mark.parametrize("name", THESIS_MODELS)
def test_the_heuristic_is_algorithm_2(name):
    (heuristic,) = (of for of in COMPARED if of.largest_first)
    loads = [0] * 4
    for size in sorted((parameter.elems for parameter in load(name).parameters), reverse=True):
        loads[loads.index(min(loads))] += size
    assert loads_elems(heuristic.placement, heuristic.model(name), HOSTS) == loads
    assert variation(loads) < 0.002


def test_round_robin_varies_where_weights_and_biases_alternate():
    """GoogLeNet's weights are on two of four servers, as are Inception-v4's."""
    (round_robin,) = (of for of in COMPARED if of.placement == "whole_round_robin")
    varies = {
        name: variation(loads_elems(round_robin.placement, name, HOSTS)) for name in THESIS_MODELS
    }
    assert varies["resnet110"] < 0.05
    assert varies["googlenet"] > varies["inception_v4"] > 0.9


def test_variation_is_the_standard_deviation_by_the_mean():
    assert variation([1, 3, 1, 3]) == 0.5
    assert variation([7, 7, 7, 7]) == 0


def test_the_busiest_link_bounds_the_speed_up():
    ratio = RATIOS["inception_v4"]
    assert most_speed_up("inception_v4", [5, 5, 5, 5]) == pytest.approx(4 / ratio)
    # Half of the model on a host: it carries half of its gradients and three halves of values.
    assert most_speed_up("inception_v4", [2, 0, 2, 0]) == pytest.approx(4 / ratio * 1.5 / 2)


def _run(model, system, seconds, rate=50.0, placement=None, repetition=0):
    compute_s = load(model).compute_s
    settings = {by_placement.SETTING: placement} if placement else {}
    return {
        "model": model, "system": system, "hosts": 4, "rate_mbit_s": rate, "dilation": 1.0,
        "settings": settings, "congestion_control": "cubic", "warm_up": 2, "iterations": 2,
        "repetition": repetition, "compute_s": compute_s, "cpu_s": 1.0,
        "iteration_s": [seconds * compute_s] * 2,
    }  # fmt: skip


def test_placements_are_told_and_drawn_with_what_was_measured(tmp_path):
    records = Records(tmp_path / "thesis_placement.json", {})
    for at, of in enumerate(COMPARED):
        for repetition, longer in enumerate((1.0, 1.1, 1.25)):
            seconds = longer * (at + 2)
            model = of.model("googlenet")
            records.add_run(_run(model, "p3kv", seconds, 50.0, of.placement, repetition))
    records.add_run(_run("googlenet", "p3kv", 1.25, None, "uniform_split"))
    table = by_placement.summarize(records.runs)
    googlenet = [row for row in table if row["model"] == "googlenet"]
    assert [row["speed_up"]["median"] for row in googlenet] == pytest.approx(
        [4 / 1.1 / longer for longer in (2, 3, 4, 5)]
    )
    assert googlenet[0]["speed_up"]["low"] == pytest.approx(4 / 1.25 / 2)
    assert [row["unlimited_efficiency"] for row in googlenet] == [None, 0.8, None, None]
    assert all(row["speed_up"] is None for row in table if row["model"] != "googlenet")
    text = by_placement.table_text(table)
    assert "1.82 (1.60 to 2.00)" in text and "efficiency without a limit 0.800" in text
    curves.finish(records, by_placement.draw(table, []))
    assert_is_picture(tmp_path / "thesis_placement.png")


def test_optimizations_are_set_beside_the_baseline_and_the_thesis(tmp_path):
    records = Records(tmp_path / "thesis_optimizations.json", {})
    for system, seconds in (("p3kv_in_turn", 2.2), ("slicing", 1.4), ("p3kv_topk", 1.1)):
        records.add_run(_run("resnet110", system, seconds))
    records.add_run(_run("resnet110", "p3kv_topk", 1.01, None))
    rows = {row["system"]: row for row in by_optimization.summarize(records.runs)}
    assert set(rows) == {"p3kv_in_turn", "slicing", "p3kv_topk"}
    assert rows["slicing"]["speed_up"]["median"] == pytest.approx(4 / 1.4)
    assert rows["slicing"]["gain"] == pytest.approx(2.2 / 1.4, abs=1e-3)
    assert (rows["slicing"]["thesis_gain"], rows["p3kv_topk"]["thesis_gain"]) == (1.54, None)
    assert rows["p3kv_topk"]["unlimited_efficiency"] == pytest.approx(1 / 1.01, abs=1e-4)
    figure = by_optimization.draw(list(rows.values()), [])
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([4 / 2.2, 4 / 1.4, 4 / 1.1])
    curves.finish(records, figure)
    assert_is_picture(tmp_path / "thesis_optimizations.png")
