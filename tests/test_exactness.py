"""The weights after 50 steps are those of synchronous SGD."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Dict

import numpy as np
import pytest

from tests.jobs import SCRIPTS, run_job

sys.path.insert(0, str(SCRIPTS))
import exact_model
import mxnet as mx


def summed_in_rank_order(name: str, num_workers: int) -> Dict[str, np.ndarray]:
    """One process that takes the workers' batches one after the other, and sums in numpy."""
    net = exact_model.network()
    parameters = [p for _, p in sorted(net.collect_params().items())]
    optimizer = mx.optimizer.create(
        name, rescale_grad=1 / exact_model.BATCH, **exact_model.OPTIMIZERS[name]
    )
    updater = mx.optimizer.get_updater(optimizer)
    for step in range(exact_model.STEPS):
        totals: list = []
        for rank in range(num_workers):
            exact_model.backward(net, *exact_model.part(step, rank, num_workers))
            gradients = [p.grad().asnumpy() for p in parameters]
            totals = gradients if not totals else [t + g for t, g in zip(totals, gradients)]
        for index, (parameter, total) in enumerate(zip(parameters, totals)):
            updater(index, mx.nd.array(total), parameter.data())
    return exact_model.weights(net)


def trained(
    tmp_path: Path,
    name: str,
    update_on_kvstore: bool,
    workers: int,
    servers: int,
    **settings: object,
) -> Dict[str, np.ndarray]:
    path = tmp_path / "weights.npz"
    result = run_job(
        "exact.py",
        [path, name, int(update_on_kvstore)],
        workers,
        servers,
        P3KV_SLICE_SIZE=exact_model.SLICE_SIZE,
        MXNET_UPDATE_ON_KVSTORE=int(update_on_kvstore),
        **settings,
    )
    assert result.code == 0, result.output
    return dict(np.load(path))


# Of the 48 cases a quarter, in which any two of the four parameters have all their values together.
CASES = [
    pytest.param(
        workers, servers, name, on_servers,
        id=f"{workers}w{servers}s-{name}-{'servers' if on_servers else 'workers'}",
    )
    for workers, servers, name, on_servers in itertools.product(
        (1, 2, 3, 4), (1, 2, 3), ("sgd", "adam"), (True, False)
    )
    if (workers + servers + (name == "sgd")) % 2 == 0
    and (workers // 2 + servers + on_servers) % 2 == 0
]  # fmt: skip


@pytest.mark.parametrize(("workers", "servers", "name", "update_on_kvstore"), CASES)
def test_weights_equal_one_process_on_the_joined_batches(
    tmp_path: Path, workers: int, servers: int, name: str, update_on_kvstore: bool
) -> None:
    weights = trained(tmp_path, name, update_on_kvstore, workers, servers)
    exact_model.assert_trained_as_by_one_process(weights, name)


@pytest.mark.parametrize("update_on_kvstore", [True, False], ids=["servers", "workers"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(("workers", "servers"), [(3, 2), (4, 3)])
def test_deterministic_mode_equals_sums_in_rank_order_bit_for_bit(
    tmp_path: Path, workers: int, servers: int, name: str, update_on_kvstore: bool
) -> None:
    weights = trained(tmp_path, name, update_on_kvstore, workers, servers, P3KV_DETERMINISTIC=1)
    for key, value in summed_in_rank_order(name, workers).items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)


@pytest.mark.parametrize(("name", "workers", "servers"), [("lamb", 3, 2), ("nadam", 2, 3)])
def test_whole_tensors_and_numbers_that_keys_share_are_exact_with_several_workers(
    tmp_path: Path, name: str, workers: int, servers: int
) -> None:
    weights = trained(tmp_path, name, True, workers, servers, P3KV_DETERMINISTIC=1)
    for key, value in summed_in_rank_order(name, workers).items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)


def test_deterministic_mode_is_exact_in_the_engine_that_people_debug_with(tmp_path: Path) -> None:
    """It runs an operation where it is pushed: a push returns when its round has ended."""
    settings = {"P3KV_DETERMINISTIC": 1, "MXNET_ENGINE_TYPE": "NaiveEngine"}
    weights = trained(tmp_path, "adam", True, 2, 2, **settings)
    for key, value in summed_in_rank_order("adam", 2).items():
        np.testing.assert_array_equal(weights[key], value, err_msg=key)
