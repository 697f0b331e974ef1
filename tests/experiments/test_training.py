"""Real networks learn real data over p3kv, and figures tell codecs apart by what they learn."""

from __future__ import annotations

from typing import Any, Dict, Iterator

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import convergence, figure11
from experiments.campaign.training import train
from experiments.cluster import Cluster, missing_requirements
from experiments.drawing import by_encoding, over_epochs
from experiments.training import data, networks
from experiments.training.encodings import ENCODINGS, Encoding
from experiments.training.tasks import TASKS

_PROBLEM = missing_requirements()
needs_cluster = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


@pytest.fixture(autouse=True)
def _no_open_figures() -> Iterator[None]:
    yield
    plt.close("all")


# Data and networks


def test_no_digit_is_for_training_and_for_validation():
    digits = data.digits()
    assert digits.training.shape == (4000, 1, 28, 28)
    assert np.bincount(digits.validation_labels.astype(int)).tolist() == [100] * 10
    assert (digits.training.min(), digits.training.max()) == (0, 1)
    trained = {image.tobytes() for image in digits.training}
    assert not any(image.tobytes() in trained for image in digits.validation)


def test_a_label_of_text_is_the_character_that_follows():
    text = data.source_text(length=10, training_elems=1000, validation_elems=50)
    assert text.training.shape == (100, 10) and text.validation.shape == (5, 10)
    joined, following = text.training.ravel(), text.training_labels.ravel()
    assert np.array_equal(joined[1:], following[:-1])
    characters = "".join(data.ALPHABET[int(place)] for place in joined)
    assert characters.startswith('"""') or characters.startswith("#") or "import" in characters


def test_a_residual_network_has_six_layers_for_each_block_and_two():
    network = networks.residual_network(blocks=2, classes=10)
    network.initialize()
    assert network(mx.nd.zeros((3, 1, 28, 28))).shape == (3, 10)
    weights = [p for name, p in network.collect_params().items() if name.endswith("weight")]
    around = [p for p in weights if p.shape[2:] == (1, 1)]
    assert (len(weights) - len(around), len(around)) == (6 * 2 + 2, 2)


@needs_cluster
@pytest.mark.long  # tests/codecs count what is sent
def test_a_training_learns_and_its_codec_halves_what_is_sent():
    with Cluster(1) as cluster:
        found = train(cluster, "digits", ENCODINGS["float16"], 0, 1, TASKS["digits"].recipe)
    (validated,) = found["validated"]
    assert validated["accuracy"] > 0.5  # of ten digits
    assert found["sent_share"] == pytest.approx(0.5, abs=0.02)
    assert found["received_share"] == pytest.approx(1, abs=0.02)


def test_the_warm_up_is_a_part_of_all_steps():
    encoding = Encoding("", "one:steps={warm_up_steps}", "another", "rule")
    assert encoding.environment(1000) == {
        "P3KV_GRADIENT_CODEC": "one:steps=200", "P3KV_VALUE_CODEC": "another",
        "P3KV_CONSISTENCY": "rule",
    }  # fmt: skip


# What codecs cost


def _training(encoding: str, seed: int, accuracy: float, **changes: Any) -> Dict[str, Any]:
    return {
        "task": "digits", "encoding": encoding, "seed": seed, "epochs": 2,
        "validated": [{"loss": 1.0, "accuracy": 0.1}, {"loss": 0.5, "accuracy": accuracy}],
        "sent_share": 1.0, "received_share": 1.0, **changes,
    }  # fmt: skip


def _compared() -> list:
    """Three pairs that differ by -0.02, -0.04 and -0.06."""
    exact = [_training("exact", seed, 0.9 + seed / 100) for seed in range(3)]
    others = [
        _training("topk", seed, 0.9 + seed / 100 - 0.02 * (seed + 1), sent_share=0.02)
        for seed in range(3)
    ]
    return exact + others


def test_a_codec_is_compared_with_exact_seed_by_seed():
    exact, topk = by_encoding.summarize(_compared())
    assert (exact["mean"], topk["mean"]) == (pytest.approx(0.91), pytest.approx(0.87))
    against = by_encoding.Comparison(**topk["against_exact"])
    # By hand: mean -0.04, standard error 0.02 / sqrt(3), t = -sqrt(12), and Student's t with 2
    # degrees has the distribution 1/2 + t / (2 sqrt(2 + t^2)).
    assert against.mean == pytest.approx(-0.04)
    assert against.p == pytest.approx(1 - (12 / 14) ** 0.5)
    assert against.high - against.mean == pytest.approx(4.30265 * 0.02 / 3**0.5, rel=1e-4)
    text = by_encoding.table_text([exact, topk])
    assert "-0.0400 (-0.0897 to +0.0097), p = 0.074" in text and "sends 0.0200" in text


def test_what_has_no_pairs_is_not_compared():
    alone = [_training("topk", 0, 0.9), _training("exact", 1, 0.9), _training("exact", 2, 0.8)]
    assert all("against_exact" not in row for row in by_encoding.summarize(alone))
    same = [_training(name, seed, 0.9) for name in ("exact", "topk") for seed in range(2)]
    assert all("against_exact" not in row for row in by_encoding.summarize(same))


def test_seeds_and_their_mean_are_drawn():
    figure = by_encoding.draw(by_encoding.summarize(_compared()))
    (axis,) = figure.axes
    drawn = [list(line.get_ydata()) for line in axis.lines if line.get_marker() == "o"]
    assert drawn == [pytest.approx([-0.02, -0.04, -0.06])]
    assert "accuracy 0.9100 (sd 0.0100)" in axis.get_title()
    _assert_drawn(figure)


def test_trainings_with_all_encodings_are_paired_by_seed():
    planned = [*convergence.cases(list(TASKS), list(ENCODINGS), 5, quick=False)]
    assert len(planned) == 5 * len(TASKS) * len(ENCODINGS) == len(set(planned))
    assert {case.seed for case in planned[: len(planned) // 5]} == {0}


# Figure 11


def _over_epochs(encoding: str, accuracies: list, **changes: Any) -> Dict[str, Any]:
    return {
        "encoding": encoding, "setting": 0, "rate_mbit_s": None, "epoch_s": [9.0, 2.0, 4.0],
        "validated": [{"accuracy": one} for one in accuracies], **changes,
    }  # fmt: skip


def test_figure_11_has_bands_over_settings_and_the_time_of_an_epoch():
    runs = [
        _over_epochs("exact", [0.91, 0.97]),
        _over_epochs("exact", [0.93, 0.99], setting=1),
        _over_epochs("dgc", [0.90, 0.96]),
        _over_epochs("dgc", [0.90, 0.95], setting=1),
        _over_epochs("exact", [0.5, 0.5, 0.5], rate_mbit_s=25.0),
        _over_epochs("dgc", [0.5, 0.5, 0.5], rate_mbit_s=25.0, epoch_s=[9.0, 1.0, 2.0]),
    ]
    summary = over_epochs.summarize(runs)
    assert summary["exact"]["accuracy"][-1] == pytest.approx([0.97, 0.98, 0.99])
    assert summary["dgc"]["epoch_s"] == {"25": 1.5}
    assert summary["dgc_loses"]["mean"] == pytest.approx(0.025)
    assert "DGC loses 0.0250 in the mean" in over_epochs.table_text(summary)
    figure = over_epochs.draw(summary, "a network", 4)
    by_epoch, by_time = figure.axes
    assert list(by_epoch.lines[0].get_xdata()) == [1, 2]
    assert [list(line.get_xdata()) for line in by_time.lines] == [[3.0, 6.0], [1.5, 3.0]]
    _assert_drawn(figure)


def test_figure_11_times_both_encodings_and_trains_with_each_setting():
    planned = [*figure11.cases(settings=5, epochs=7)]
    trained = [case for case in planned if case.rate_mbit_s is None]
    assert {(case.encoding, case.setting) for case in trained} == {
        (encoding, setting) for encoding in ("exact", "dgc") for setting in range(5)
    }
    assert {case.epochs for case in trained} == {7}
    assert len(planned) - len(trained) == 2 * len(figure11.RATES_MBIT_S)


def _assert_drawn(figure: Figure) -> None:
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]
    assert pixels.min() < pixels.max()
