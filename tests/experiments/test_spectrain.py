"""SpecTrain's figures: errors of weights are measured in real jobs, and recorded runs are told
right."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.campaign.training import train_stale
from experiments.cluster import missing_requirements
from experiments.drawing import by_prediction, by_weight_error
from experiments.spectrain import error, training
from experiments.spectrain.recipes import OPTIMIZERS, RECIPES
from experiments.training.rules import DAMPED, EXACT, PREDICTED, RULES, STALE
from experiments.training.true_weights import Errors
from tests.experiments.pictures import assert_is_picture

_PROBLEM = missing_requirements()
needs_cluster = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


@pytest.fixture(autouse=True)
def _no_open_figures() -> Iterator[None]:
    yield
    plt.close("all")


@needs_cluster
@pytest.mark.long
def test_a_job_tells_how_far_stale_and_predicted_weights_are_from_the_true_ones():
    recipe = RECIPES["digits"][0]
    stale, predicted = (
        train_stale("digits", RULES[rule], 2, 0, 30, 1, recipe) for rule in (STALE, PREDICTED)
    )
    # Without prediction, a worker has exactly the weights of two steps before.
    assert stale["errors"] == stale["stale_errors"]
    assert stale["errors"][0] == 0 and min(stale["errors"][1:]) > 0
    assert predicted["stale_errors"][:4] == stale["errors"][:4]
    later = slice(3, None)
    assert np.mean(predicted["errors"][later]) < np.mean(predicted["stale_errors"][later])
    assert len(predicted["losses"]) == 30 and len(predicted["validated"]) == 1
    assert 0 < predicted["validated"][0]["accuracy"] < 1


def test_errors_are_those_of_the_weights_used_and_of_older_true_ones():
    errors = Errors(staleness=2)
    for own, true in ((0, 0), (0, 3), (1, 4), (2, 7)):
        errors.add(np.full(5, own, np.float32), np.full(5, true, np.float32))
    assert errors.own == [0, 3, 3, 5]
    assert errors.stale == [0, 3, 4, 4]


# Figure 9


def _errors(rule: str, staleness: int, errors: List[float], stale: List[float]) -> Dict[str, Any]:
    return {
        "optimizer": "sgd", "staleness": staleness, "rule": rule, "steps": len(errors),
        "errors": errors, "stale_errors": stale,
    }  # fmt: skip


def test_steps_with_initial_weights_are_not_counted():
    runs = [_errors(PREDICTED, 1, [0.0, 9.0, 1.0, 2.0, 3.0], [0.0, 9.0, 2.0, 2.0, 8.0])]
    (row,) = by_weight_error.summarize(runs)
    assert (row["error"], row["stale_error"], row["ratio"]) == (2, 4, 0.5)
    assert row["steps_below"] == pytest.approx(2 / 3, abs=1e-3)
    assert "0.500 of it, smaller in 66.7% of steps" in by_weight_error.table_text([row])


def test_figure_9_has_a_panel_for_each_optimizer_and_staleness():
    planned = [*error.cases(quick=False)]
    assert {(case.optimizer, case.staleness, case.rule) for case in planned} == {
        (optimizer, staleness, rule)
        for optimizer in OPTIMIZERS for staleness in (1, 2, 3) for rule in (PREDICTED, DAMPED)
    }  # fmt: skip
    curve = np.linspace(1, 2, 40).tolist()
    runs = [
        {**_errors(case.rule, case.staleness, curve, curve), "optimizer": case.optimizer}
        for case in planned
    ]
    figure = by_weight_error.draw(runs, "a network")
    assert [axis.get_title() for axis in figure.axes][-1] == "Adam, s = 3"
    assert all(len(axis.lines) == 8 for axis in figure.axes)


# Figure 12 and table 1


def _training(rule: str, seed: int, accuracy: float) -> Dict[str, Any]:
    return {
        "task": "digits", "learning_rate": 0.1, "rule": rule, "seed": seed, "steps": 40,
        "losses": [0.9, 0.5],
        "validated": [
            {"loss": 0.4, "accuracy": accuracy}, {"loss": 0.6, "accuracy": accuracy - 0.1}
        ],
        "error": 0.5, "stale_error": 1.0,
    }  # fmt: skip


def test_the_best_of_each_training_is_compared_seed_by_seed():
    runs = [_training(EXACT, seed, 0.9 + seed / 100) for seed in range(3)]
    runs += [_training(STALE, seed, 0.88 + (seed % 2) / 100) for seed in range(3)]
    runs += [_training(PREDICTED, seed, 0.9 + seed / 50) for seed in range(3)]
    exact, stale, predicted = by_prediction.summarize(runs)
    assert exact["training_loss"]["mean"] == 0.5 and exact["validation_loss"]["mean"] == 0.4
    assert exact["accuracy"]["mean"] == pytest.approx(0.91)
    assert stale["accuracy"]["less_exact"]["mean"] == pytest.approx(-0.08 / 3, rel=1e-2)
    assert predicted["accuracy"]["less_exact"]["mean"] == pytest.approx(0.01)
    assert "less_exact" not in predicted["training_loss"]  # all the same
    assert predicted["error_by_stale"] == 0.5
    text = by_prediction.table_text([exact, stale, predicted])
    assert "less exact's +0.0100 (-0.0148 to +0.0348), p = 0.225" in text
    figure = by_prediction.draw(runs)
    accuracy = figure.axes[2]
    assert [line.get_label() for line in accuracy.lines][3::4] == [
        RULES[rule].title for rule in (EXACT, STALE, PREDICTED)
    ]


def test_trainings_by_all_rules_are_paired_by_seed():
    planned = [*training.cases(5, quick=False)]
    assert len(planned) == 5 * sum(map(len, RECIPES.values())) * len(RULES) == len(set(planned))
    assert {case.seed for case in planned[: len(planned) // 5]} == {0}


@needs_cluster
@pytest.mark.long
@pytest.mark.parametrize("figure", [error, training])
def test_a_quick_figure_is_made(figure, tmp_path):
    figure.main(["--quick", "--output", str(tmp_path)])
    (picture,) = tmp_path.glob("spectrain_*-quick.png")
    assert_is_picture(picture)
