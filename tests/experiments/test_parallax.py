"""Parallax's models have its sizes, and its figures show what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.cluster import missing_requirements
from experiments.emulation.sparse_emulator import drawn_rows
from experiments.models.parallax import NAMES, SCALE, sparse_model
from experiments.parallax import pictures, servers, words
from experiments.parallax.cases import WAYS, Case, run, summarize, table_text
from experiments.training import data
from tests.experiments.pictures import assert_is_picture
from tests.on_cluster import needs


@pytest.fixture(autouse=True)
def _no_open_figures() -> Iterator[None]:
    yield
    plt.close("all")


def test_models_have_the_paper_s_sizes_but_for_their_scale() -> None:
    for name, dense, sparse, alpha in (("lm", 9.4e6, 813e6, 0.02), ("nmt", 94.1e6, 74.9e6, 0.6)):
        of = sparse_model(name)
        tables = sum(table.rows * table.columns for table in of.tables)
        assert SCALE * tables == pytest.approx(sparse, rel=0.001)
        assert SCALE * (of.model.elems - tables) == pytest.approx(dense, rel=0.005)
        assert of.alpha == pytest.approx(alpha, abs=0.002)
        assert of.with_alpha(0.7).alpha == pytest.approx(0.7, abs=0.01)
        assert of.with_alpha(1.0).alpha == 1.0
    images = sparse_model("resnet50")
    assert SCALE * images.model.elems == pytest.approx(25.5e6, rel=0.01) and images.alpha == 1.0


@needs(missing_requirements())
@pytest.mark.parametrize("way", ["p3kv", pytest.param("dense", marks=pytest.mark.long)])
def test_a_model_s_tables_travel_by_rows_or_whole(way: str) -> None:
    """NMT: a worker's rows are 1.7 MB, its tables 18.7 MB, its dense arrays 23.4 MB; half of them
    leaves each of two hosts."""
    found = run(Case(way, "nmt", 2), iterations=1, warm_up=1)
    assert found["iteration_s"][0] >= 0.99 * found["compute_s"] > 2.0
    sent = {"dense": 42e6}.get(way, 25.2e6)
    assert found["sent_bytes"] == pytest.approx(sent, rel=0.1), found


def measured(way: str, model: str, seconds: float, **more: Any) -> Dict[str, Any]:
    case = Case(way, model, **{"hosts": 4, **more})
    return {
        **case._asdict(), "iteration_s": [seconds, 1.1 * seconds], "compute_s": 1.0,
        "dilation": 8.0, "sent_bytes": 1_000_000,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["by_hosts", "by_part", "by_workers", "by_alpha"])
def test_throughputs_are_summed_up_and_drawn(name: str, tmp_path: Path) -> None:
    runs: List[Dict[str, Any]] = []
    for at, way in enumerate(WAYS):
        for count in (1, 2, 4):
            more = {
                "by_hosts": {"hosts": count}, "by_workers": {"per_host": count},
                "by_alpha": {"alpha": None if way == "dense" else count / 4},
            }.get(name, {})  # fmt: skip
            for model in NAMES[:2]:
                runs.append(measured(way, model, 1.0 + at / 4, **more))
    table = summarize(runs)
    first = next(row for row in table if row["way"] == "p3kv" and row["model"] == "lm")
    batches = first["hosts"] * first["per_host"] * 2560 * 8.0
    made = first["throughput"]
    assert made["high"] == pytest.approx(batches / first["iteration_s"]["low"])
    assert "words/s" in table_text(table)
    figure = getattr(pictures, name)(table)
    figure.savefig(tmp_path / "figure.png")
    assert_is_picture(tmp_path / "figure.png")


def test_the_choice_of_servers_is_drawn_beside_the_full_search(tmp_path: Path) -> None:
    runs = [{"servers": 0, "choice": 2, "confidence": 0.9, "by_servers": {"1": [0.3], "2": [0.2]}}]
    runs += [
        {"servers": count, "iteration_s": [seconds] * 3}
        for count, seconds in ((1, 0.31), (2, 0.21), (3, 0.2), (4, 0.24))
    ]
    found = servers.summarize(runs)
    assert (found["best"], found["choice_behind"]) == (3, 0.05)
    assert "chooses 2 (sure to 90%), the full search 3: the choice is 5.0% slower" in (
        servers.table_text(found)
    )
    servers.draw(found).savefig(tmp_path / "figure.png")
    assert_is_picture(tmp_path / "figure.png")


def test_a_training_is_told_by_its_perplexity_and_how_far_it_is_from_one_process(
    tmp_path: Path,
) -> None:
    falling = [5000.0, words.PERPLEXITY, words.PERPLEXITY / 2]
    steps = 2 * words.VALIDATE_EVERY
    runs = [
        {"system": system, "step_s": [seconds] * steps, "losses": [loss] * steps,
         "perplexities": falling}
        for system, seconds, loss in
        (("alone", 0.1, 4.0), ("dist_sync", 0.4, 4.0), ("p3kv", 0.2, 4.1))
    ]  # fmt: skip
    table = words.summarize(runs)
    assert [row["steps_until"] for row in table] == [words.VALIDATE_EVERY] * 3
    assert table[2]["seconds_until"] == 5.0
    assert [round(row["loss_off"], 6) for row in table] == [0.0, 0.0, 0.025]
    words.draw(runs).savefig(tmp_path / "figure.png")
    assert_is_picture(tmp_path / "figure.png")


def test_words_are_numbered_by_frequency_and_modules_held_out() -> None:
    split = data.source_words(16, 100, 3200, 1600)
    assert split.training.shape == (200, 16) and split.validation.shape == (100, 16)
    assert np.array_equal(split.training[0][1:], split.training_labels[0][:-1])
    assert split.training.max() <= 99 and split.training.min() == 0
    larger = data.source_words(16, 1000, 3200, 1600).training
    assert np.array_equal(np.where(larger < 100, larger, 0), split.training)


def test_rows_are_drawn_by_zipfs_law_and_as_many_as_alpha_says() -> None:
    rows, touched, times = 2000, 100, 300
    drawn = [drawn_rows(np.random.RandomState(seed), rows, touched) for seed in range(times)]
    assert all(len(np.unique(one)) == touched and (np.diff(one) > 0).all() for one in drawn)
    counts = np.sort(np.bincount(np.concatenate(drawn), minlength=rows))[::-1]
    # The first are in nearly each batch; of seldom words one in 1,500 twice as often as one in 750.
    assert (counts[:5] > 0.9 * times).all()
    assert 1.6 < counts[700:800].mean() / counts[1400:1600].mean() < 2.4
    # So workers touch the same rows, which two even draws of 5 % of a table hardly do.
    assert len(np.intersect1d(drawn[0], drawn[1])) > 20
