"""PyTorch's systems are measured as MXNet's are: in their own environment, on the same hosts."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from experiments import large_table, torch_throughput, torch_training
from experiments.campaign.campaign import Campaign, point
from experiments.campaign.records import Records
from experiments.cluster import missing_requirements
from experiments.drawing.by_ratio import draw, summarize, table_text
from experiments.emulation import systems
from experiments.emulation.plain_layers import layers_as_text, layers_from_text
from experiments.emulation.systems import IN_TORCH, SYSTEMS
from experiments.models import load
from tests.experiments.pictures import assert_is_picture

_PROBLEM = missing_requirements() or SYSTEMS["p3kv_torch"].missing
needs_torch = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


def test_a_worker_without_mxnet_is_told_all_that_it_needs_of_a_model():
    model = load("gpt2_small")
    layers = layers_from_text(layers_as_text(model), dilation=2.0)
    assert [one.shapes for one in layers] == [
        [list(parameter.shape) for parameter in layer.parameters] for layer in model.layers
    ]
    assert [one.forward_s for one in layers] == [2 * seconds for seconds in model.forward_s]
    assert [one.backward_s for one in layers] == [2 * seconds for seconds in model.backward_s]


@pytest.mark.long
@needs_torch
def test_each_system_computes_and_sends_all_that_it_has_to(tmp_path):
    """At M/C = 4 an iteration takes at least M, which FSDP2's reduce-scatter of gloo makes more."""
    at = point("three_layers", 2, 4.0, 1.0, ("p3kv_torch", "ddp_1mb", "fsdp2"), 8)
    records = Records(tmp_path / "torch.json", {})
    with Campaign(records, warm_up=1) as measuring:
        measuring.measure([at], 1)
    assert [run["system"] for run in records.runs] == list(at.systems)
    for run in records.runs:
        assert "failures" not in run and len(run["iteration_s"]) == at.iterations
        assert sum(run["iteration_s"]) > 0.9 * at.iterations * at.wire_s
        assert run["compute_s"] == pytest.approx(at.compute_s)
        assert run["versions"]["torch"]
    (row,) = summarize(records.runs)
    assert row["ratio"] == pytest.approx(4, abs=0.05)
    assert set(row["efficiency"]) == set(at.systems)
    assert row["over_ddp"] > 0 and "so many times as fast as DDP" in table_text([row])
    picture = tmp_path / "torch.png"
    draw([row], []).savefig(picture)
    assert_is_picture(picture)


def test_without_pytorch_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(systems, "_TORCH", tmp_path)
    with pytest.raises(SystemExit, match=r"PyTorch is not there yet: \./scripts/test installs it"):
        torch_throughput.main(["--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_every_system_runs_where_m_is_c_and_two_elsewhere():
    chosen = torch_throughput.arguments(["--models", "resnet50"])
    here, elsewhere = torch_throughput.points(chosen, [1.0, None])
    assert here.systems == IN_TORCH
    assert elsewhere.systems == ("p3kv_torch", "ddp_5mb") and elsewhere.rate_mbit_s is None


@pytest.mark.long
@needs_torch
def test_a_training_that_is_not_emulated_has_the_losses_of_one_process(tmp_path):
    torch_training.main(["--quick", "--output", str(tmp_path)])
    table = Records(tmp_path / "torch_training-quick.json", {}).summary
    assert [row["system"] for row in table] == ["alone", "p3kv_torch", "ddp_25mb"]
    assert all(row["most_different"] < 1e-3 for row in table)
    assert_is_picture(tmp_path / "torch_training-quick.png")


def test_steps_of_a_large_table_are_summed_up_and_drawn(tmp_path):
    def run(rows, seconds):
        taken = {str(ids): [seconds, 2 * seconds, 3 * seconds] for ids in large_table.IDS}
        return {
            "rows": rows, "step_s": {"asked": taken, "prefetched": taken}, "server_rss_mib": 9,
            "worker_grown_mib": 2, "checkpoint_s": 7, "while_written_s": [seconds, seconds, 1],
        }  # fmt: skip

    table = large_table.summarize([run(10_000, 0.1), run(1_000_000, 0.2)])
    text = large_table.table_text(table)
    assert "  0.51 GB asked         256 ids:   400.0 ms (200.0 to 600.0), server 9 MiB" in text
    assert text.count("checkpoint 7 s, steps of 4096 ids meanwhile 100.0 ms") == 8
    assert len(text.splitlines()) == 16
    figure = large_table.draw(table)
    figure.savefig(tmp_path / "figure.png")
    plt.close(figure)
    assert_is_picture(tmp_path / "figure.png")
