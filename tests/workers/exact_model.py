"""The network, data and steps that jobs and the single process train alike.

Activations are smooth: with ReLU or max pooling, a sum in another order can flip a unit, and
weights then differ by 1 % after some steps, whatever the store.
"""

from functools import lru_cache
from pathlib import Path
from typing import Mapping

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

STEPS = 50
BATCH = 16
SLICE_SIZE = 500
INPUTS = 50
# With slices of 500 elements: a weight of many slices, one of exactly one, and small biases.
_UNITS = (120, 40, 10)
_TAIL = 50
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3},
    "adam": {"learning_rate": 0.003, "wd": 1e-3},
    "lamb": {"learning_rate": 0.003, "wd": 1e-3},
    "nadam": {"learning_rate": 0.003, "wd": 1e-3},
}


def network() -> gluon.nn.HybridSequential:
    """The network with its initial weights, the same in every process."""
    mx.random.seed(7)
    net = gluon.nn.HybridSequential(prefix="exact_")
    with net.name_scope():
        inputs = INPUTS
        for units in (*_UNITS, _TAIL, 3):
            net.add(gluon.nn.Dense(units, activation="tanh", in_units=inputs))
            inputs = units
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def part(step: int, rank: int, num_workers: int) -> tuple:
    """The rows of a step's batch that belong to a worker: 5, 5 and 6 of three."""
    generator = np.random.RandomState(step)
    x = generator.standard_normal((BATCH, INPUTS)).astype(np.float32)
    y = generator.standard_normal((BATCH, 3)).astype(np.float32)
    rows = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    return mx.nd.array(x[rows]), mx.nd.array(y[rows])


def backward(net: gluon.Block, x: mx.nd.NDArray, y: mx.nd.NDArray) -> None:
    """Leaves the gradients of the summed loss in the network."""
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(x), y).sum()
    loss.backward()


def weights(net: gluon.Block) -> dict:
    """All weights as numpy arrays."""
    return {name: p.data().asnumpy() for name, p in net.collect_params().items()}


def save(net: gluon.Block, folder: str, training: str) -> None:
    """Writes all weights to a file of the training's."""
    np.savez(f"{folder}/{training}.npz", **weights(net))


def saved(folder: Path, training: str) -> dict:
    """The weights that `save` has written."""
    return dict(np.load(folder / f"{training}.npz"))


@lru_cache(maxsize=None)
def joined_batches(name: str) -> dict:
    """The weights of one process, the whole batch at once, MXNet's own Trainer without a store."""
    net = network()
    trainer = gluon.Trainer(net.collect_params(), name, OPTIMIZERS[name], kvstore=None)
    for step in range(STEPS):
        backward(net, *part(step, 0, 1))
        trainer.step(BATCH)
    return weights(net)


def assert_trained_as_by_one_process(trained: Mapping, name: str) -> None:
    """Fails unless a job's weights are those of one process, up to the rounding of sums."""
    expected = joined_batches(name)
    assert trained.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(trained[key], value, rtol=1e-4, atol=2e-5, err_msg=key)
