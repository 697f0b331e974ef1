"""What is told of codecs: their processor time, their efficiency, and from where on they pay."""

from __future__ import annotations

import json

import pytest

from experiments import codecs
from experiments.campaign.campaign import point
from experiments.campaign.codec_cost import cost
from experiments.campaign.records import Records
from experiments.cluster import missing_requirements
from experiments.drawing import curves
from experiments.drawing.by_codec import CODECS, COMPARED, draw, summarize, table_text
from experiments.emulation.systems import SYSTEMS
from experiments.models import load
from tests.experiments.pictures import assert_is_picture

_PROBLEM = missing_requirements()
needs_cluster = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))
_ALONE = {"p3kv_topk": {"worker_s": 2.0, "server_s": 1.5}}


def _run(system, ratio, efficiency, model="resnet50", repetition=0):
    at = point(model, 4, ratio, 2.0, (system,), 2)
    return {
        **at._asdict(), "system": system, "settings": {}, "congestion_control": "cubic",
        "warm_up": 2, "iterations": 2, "repetition": repetition, "compute_s": at.compute_s,
        "iteration_s": [at.compute_s / efficiency] * 2, "cpu_s": 8.0,
    }  # fmt: skip


@pytest.mark.alone
def test_a_codec_alone_costs_more_than_none_and_values_of_each_worker_cost_servers():
    exact = cost("identity", "identity", 0.0)
    # In turn, since a shared machine may be slower for seconds.
    taken = [cost("topk:share=0.01", how, 0.0) for how in ("identity", "topk:share=0.01") * 3]
    gradients, both = min(taken[::2]), min(taken[1::2])
    assert exact.worker_s == 0 < exact.server_s
    assert gradients.worker_s > 0.05
    assert both.worker_s > gradients.worker_s
    assert both.server_s > gradients.server_s + 0.05


def test_dgc_costs_what_momentum_costs_besides():
    assert cost("dgc:share=0.001", "identity", 0.9).worker_s > 0.05


def test_where_a_codec_pays_is_found_between_two_ratios_and_by_its_processor_time():
    runs = [
        _run("p3kv", 1.0, 0.97), _run("p3kv", 2.0, 0.49), _run("p3kv", 4.0, 0.25),
        _run("p3kv_topk", 1.0, 0.80), _run("p3kv_topk", 2.0, 0.90), _run("p3kv_topk", 4.0, 0.91),
        _run("p3kv_topk", 4.0, 0.93, repetition=1), _run("p3kv_topk", 4.0, 0.94, repetition=2),
    ]  # fmt: skip
    summary = summarize(runs, _ALONE)
    assert [one["ratio"] for one in summary["panels"]] == [1, 2, 4]
    topk = summary["panels"][-1]["systems"]["p3kv_topk"]
    assert topk["efficiency"] == pytest.approx({"median": 0.93, "low": 0.91, "high": 0.94})
    gigabytes = 2 * 4 * load("resnet50").size_bytes / 1e9
    assert topk["cpu_s_per_gb"]["median"] == pytest.approx(8.0 / gigabytes, abs=1e-3)
    pays = summary["pays"]["p3kv_topk"]
    # The logarithm of the gain over 1.02 grows from -0.213 to 0.588.
    assert pays["measured_from"] == {"resnet50": pytest.approx(2 ** (0.213 / 0.801), abs=0.01)}
    # 0.1 GB of ResNet-50 in 0.2 s, of 0.305 s; 0.57 GB of VGG-19 in 1.15 s, of 0.48 s.
    assert pays["on_the_papers_accelerator_from"]["resnet50"] == 1
    assert pays["on_the_papers_accelerator_from"]["vgg19"] == pytest.approx(2.39, abs=0.01)
    assert pays["below_gbit_s"] == pytest.approx(1.5 * 8 / 0.957 / 2.0, abs=0.1)


def test_a_codec_that_never_pays_is_told_as_such():
    runs = [_run("p3kv", 4.0, 0.25), _run("p3kv_topk", 4.0, 0.25)]
    assert summarize(runs, _ALONE)["pays"]["p3kv_topk"]["measured_from"] == {"resnet50": None}
    always = [_run("p3kv", 2.0, 0.49), _run("p3kv_topk", 2.0, 0.9)]
    assert summarize(always, _ALONE)["pays"]["p3kv_topk"]["measured_from"] == {"resnet50": 2.0}


def test_targets_are_judged_and_all_that_was_measured_is_drawn(tmp_path):
    records = Records(tmp_path / "codecs.json", {})
    for model in ("resnet50", "vgg19"):
        for ratio in (1.0, 4.0):
            for place, system in enumerate(COMPARED):
                records.add_run(_run(system, ratio, 0.95 - 0.06 * place, model))
    summary = summarize(records.runs, _ALONE)
    text = table_text(summary)
    assert text.count("MISSED: at least 0.95") == 2  # DGC is last, at 0.35
    assert text.count("reached: at least 0.47") == 2
    figure = draw(summary, [])
    assert [axis.get_title() for axis in figure.axes if axis.get_visible()] == [
        "ResNet-50, M/C = 1", "ResNet-50, M/C = 4", "VGG-19, M/C = 1", "VGG-19, M/C = 4"
    ]  # fmt: skip
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([0.95 - 0.06 * place for place in range(len(COMPARED))])
    curves.finish(records, figure)
    assert_is_picture(tmp_path / "codecs.png")


@pytest.mark.parametrize("system", CODECS)
def test_systems_choose_codecs_that_there_are(system):
    of = SYSTEMS[system]
    chosen = [of.environment[f"P3KV_{way}_CODEC"] for way in ("GRADIENT", "VALUE")]
    assert cost(*chosen, of.momentum).worker_s > 0


@pytest.mark.long
@needs_cluster
def test_codecs_of_a_small_model_are_measured_and_drawn(tmp_path):
    command = ["--models", "three_layers", "--ratios", "4", "--warm-up", "2", "--iterations", "2"]
    systems = ["p3kv", "dist_sync_2bit", "p3kv_topk"]
    codecs.main([*command, "--systems", *systems, "--output", str(tmp_path)])
    found = json.loads((tmp_path / "codecs.json").read_text())
    (panel,) = found["summary"]["panels"]
    reached = {name: one["efficiency"]["median"] for name, one in panel["systems"].items()}
    assert set(reached) == set(systems)
    assert reached["p3kv"] < 0.26 < 0.4 < reached["p3kv_topk"]
    assert_is_picture(tmp_path / "codecs.png", 100_000)
