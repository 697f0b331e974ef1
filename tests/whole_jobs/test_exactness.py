"""The weights after 50 steps are those of synchronous SGD."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

import numpy as np
import pytest

from tests.jobs import SCRIPTS, run_job

sys.path.insert(0, str(SCRIPTS))
import exact_model
import mxnet as mx

TRAININGS = ("sgd-servers", "sgd-workers", "adam-servers", "adam-workers")
"""Of each job: an optimizer, and who updates."""
SHAPES = (
    *((1, 1), (4, 2)),
    *(pytest.param(shape, marks=pytest.mark.long) for shape in [(1, 2), (2, 3), (3, 1)]),
)
"""Workers and servers: as many, fewer and more of either. Three workers train in order of ranks."""
ORDERED = (*TRAININGS, "lamb-servers", "nadam-servers")
"""Trainings in deterministic mode: with whole tensors, and with numbers that keys share, too."""
ORDERED_SHAPES = ((3, 2), pytest.param((4, 1), marks=pytest.mark.long))


@lru_cache(maxsize=None)
def summed_in_rank_order(name: str, num_workers: int, per_host: int = 1) -> Dict[str, np.ndarray]:
    """One process that takes the workers' batches one after the other, and sums in numpy: first
    those of each host, and then these sums."""
    net = exact_model.network()
    parameters = [p for _, p in sorted(net.collect_params().items())]
    optimizer = mx.optimizer.create(
        name, rescale_grad=1 / exact_model.BATCH, **exact_model.OPTIMIZERS[name]
    )
    updater = mx.optimizer.get_updater(optimizer)
    for step in range(exact_model.STEPS):
        gradients = []
        for rank in range(num_workers):
            exact_model.backward(net, *exact_model.part(step, rank, num_workers))
            gradients.append([p.grad().asnumpy() for p in parameters])
        hosts = [gradients[first : first + per_host] for first in range(0, num_workers, per_host)]
        totals = added([added(host) for host in hosts])
        for index, (parameter, total) in enumerate(zip(parameters, totals)):
            updater(index, mx.nd.array(total), parameter.data())
    return exact_model.weights(net)


def added(all_gradients: List[List[np.ndarray]]) -> List[np.ndarray]:
    """The sum of several workers' gradients, in this order."""
    totals, *others = all_gradients
    for gradients in others:
        totals = [total + gradient for total, gradient in zip(totals, gradients)]
    return totals


class Trained(NamedTuple):
    """A job that has trained, and where its weights are."""

    workers: int
    folder: Path


def train(
    folder: Path, shape: Tuple[int, int], trainings: Tuple[str, ...], **settings: object
) -> Trained:
    result = run_job(
        "exact.py", [folder, *trainings], *shape, P3KV_SLICE_SIZE=exact_model.SLICE_SIZE, **settings
    )
    assert result.code == 0, result.output
    return Trained(shape[0], folder)


def assert_summed_in_rank_order(job: Trained, training: str) -> None:
    weights = exact_model.saved(job.folder, training)
    for key, value in summed_in_rank_order(training.partition("-")[0], job.workers).items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)


def called(shape: Tuple[int, int]) -> str:
    return "{}w{}s".format(*shape)


@pytest.fixture(scope="module", params=SHAPES, ids=called)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("weights"), request.param, TRAININGS)


@pytest.mark.parametrize("training", TRAININGS)
def test_weights_equal_one_process_on_the_joined_batches(job: Trained, training: str) -> None:
    weights = exact_model.saved(job.folder, training)
    exact_model.assert_trained_as_by_one_process(weights, training.partition("-")[0])


@pytest.fixture(scope="module", params=ORDERED_SHAPES, ids=called)
def ordered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("weights")
    return train(folder, request.param, ORDERED, P3KV_DETERMINISTIC=1)


@pytest.mark.parametrize("training", ORDERED)
def test_deterministic_mode_equals_sums_in_rank_order_bit_for_bit(
    ordered: Trained, training: str
) -> None:
    assert_summed_in_rank_order(ordered, training)


def test_deterministic_mode_is_exact_in_the_engine_that_people_debug_with(tmp_path: Path) -> None:
    """It runs an operation where it is pushed: a push returns when its round has ended."""
    settings = {"P3KV_DETERMINISTIC": 1, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    assert_summed_in_rank_order(
        train(tmp_path, (2, 2), ("adam-servers",), **settings), "adam-servers"
    )
