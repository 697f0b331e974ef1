"""The thesis's figures: placements do what its text says, and recorded runs are told right."""

from __future__ import annotations

import argparse

import pytest

from experiments.campaign.campaign import DILATION
from experiments.campaign.placing import loads_elems
from experiments.campaign.records import Records
from experiments.drawing import by_accuracy, by_optimization, by_placement, curves
from experiments.drawing.by_placement import COMPARED, HOSTS, RATIOS, most_speed_up, variation
from experiments.emulation.placements import UniformSplit, WholeRoundRobin
from experiments.models import THESIS_MODELS, load
from experiments.thesis import optimizations
from p3kv.slicing.placement import Topology, checked
from p3kv.slicing.slices import Dense, TouchedRows
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
    # Five iterations of C and one of 2 C: the mean counts, and not the median.
    compute_s = load("resnet110").compute_s
    found = {
        "iteration_s": [compute_s] * 5 + [2 * compute_s],
        "total_s": 7 * compute_s,
        "used": {"in": 0.2, "out": 0.25},
    }
    records.add_run({**_run("resnet110", "p3kv_all", 1), **found})
    records.add_run({**_run("resnet110", "p3kv_all", 1), **found, "hosts": 2})
    table = by_optimization.summarize(records.runs)
    rows = {(row["system"], row["hosts"]): row for row in table}
    assert len(rows) == 5
    assert rows["slicing", 4]["speed_up"]["median"] == pytest.approx(4 / 1.4)
    assert rows["slicing", 4]["gain"] == pytest.approx(2.2 / 1.4, abs=1e-3)
    assert [rows[name, 4]["thesis_gain"] for name in ("slicing", "p3kv_topk")] == [1.54, None]
    assert rows["p3kv_topk", 4]["unlimited_efficiency"] == pytest.approx(1 / 1.01, abs=1e-4)
    combined = rows["p3kv_all", 4]
    assert combined["speed_up"]["median"] == pytest.approx(4 * 6 / 7)
    assert combined["used"] == {
        "accelerator": pytest.approx(6 / 7, abs=1e-4),
        "in": 0.2,
        "out": 0.25,
    }
    assert [rows["p3kv_all", hosts]["thesis_speed_up"] for hosts in (4, 2)] == [3.91, None]
    figure = by_optimization.draw(table, [])
    speed_ups, scaling, used = figure.axes
    heights = [bar.get_height() for bar in speed_ups.patches]
    assert heights == pytest.approx([4 / 2.2, 4 / 1.4, 4 / 1.1, 4 * 6 / 7])
    drawn = {line.get_label(): list(line.get_ydata()) for line in scaling.lines}
    assert drawn[by_optimization.COMPARED["p3kv_all"][0]] == pytest.approx([1, 12 / 7, 24 / 7])
    assert [bar.get_height() for bar in used.patches] == pytest.approx([6 / 7, 0.2, 0.25], abs=1e-4)
    curves.finish(records, figure)
    assert_is_picture(tmp_path / "thesis_optimizations.png")


def test_what_exchanges_seldom_is_measured_in_whole_periods_and_fewer_hosts_have_the_same_links():
    chosen = argparse.Namespace(
        models=["resnet110", "inception_v4"], systems=("slicing", "p3kv_all"), iterations=7,
        dilation=DILATION,
    )  # fmt: skip
    planned = optimizations.points(chosen, limited=True)
    periods = [at.iterations for at in planned if at.systems == ("p3kv_all",)]
    assert periods == [12, 12, 12]
    assert [(at.model, at.hosts) for at in planned if at.hosts != HOSTS] == [("resnet110", 2)]
    assert len({at.rate_mbit_s for at in planned}) == 2
    free = optimizations.points(chosen, limited=False)
    assert {(at.systems, at.hosts, at.rate_mbit_s) for at in free} == {(("p3kv_all",), 4, None)}


# Accuracy


def _training(way, epoch_s, accuracies, rate=130.0, seed=0):
    validated = [{"loss": 1.0, "accuracy": accuracy} for accuracy in accuracies]
    return {
        "way": way, "rate_mbit_s": rate, "seed": seed, "epochs": len(accuracies),
        "epoch_s": [epoch_s] * len(accuracies), "validated": validated,
    }  # fmt: skip


def test_the_target_is_reached_between_two_epochs_or_not_at_all():
    assert by_accuracy.reached([10, 20, 30], [0.85, 0.9, 1.0]) == pytest.approx(25)
    assert by_accuracy.reached([10, 20, 30], [1.0, 0.9, 1.0]) == pytest.approx(9.5)
    assert by_accuracy.reached([10, 20], [0.5, 0.94]) is None


def test_the_same_accuracy_takes_a_part_of_the_exact_time(tmp_path):
    runs = [
        _training("in_turn", 4.0, [0.9, 1.0]),
        _training("p3kv", 3.0, [0.9, 1.0]),
        _training("all", 1.0, [0.8, 0.9, 1.0]),
        _training("all", 2.0, [0.8, 0.9, 1.0], seed=1),
        _training("all", 1.0, [0.8, 0.9, 0.9], rate=50.0),
    ]
    table = by_accuracy.summarize(runs, steps=10)
    rows = {(row["way"], row["rate_mbit_s"]): row for row in table}
    exact, combined = rows["in_turn", 130.0], rows["all", 130.0]
    assert (exact["target_s"], exact["iteration_s"], exact["accuracy"]) == (6.0, 0.4, 1.0)
    assert (combined["target_s"], combined["target_iterations"]) == (3.75, 25)
    assert combined["time_shares"] == {"in_turn": 0.625, "p3kv": 0.833}
    assert combined["accuracy"] == 0.9  # after the two epochs that all have made
    assert rows["all", 50.0]["target_s"] is None and not rows["all", 50.0]["time_shares"]
    text = by_accuracy.table_text(table)
    assert "after 25 iterations, 3.8 s (0.62 of in_turn's, 0.83 of p3kv's)" in text
    records = Records(tmp_path / "thesis_accuracy.json", {})
    figure = by_accuracy.draw(runs, steps=10)
    by_iteration, by_time, slower = figure.axes
    lines = [list(line.get_xdata()) for line in by_iteration.lines[:-1]]
    assert lines == [[10, 20]] * 2 + [[10, 20, 30]] * 3
    assert list(by_time.lines[0].get_xdata()) == [4.0, 8.0]
    assert len(slower.lines) == 2
    curves.finish(records, figure)
    assert_is_picture(tmp_path / "thesis_accuracy.png")
