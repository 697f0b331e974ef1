"""Trains by codecs that send some elements, and compares with what one process computes.

In a job P3KV_VALUE_CODEC is topk: values are exact after `kv.synchronize` only. A process without
a job has them exact, and only the codecs of gradients.
"""

import p3kv  # noqa: F401, I001
import os

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from p3kv.errors import NotSupportedError

STEPS, SIZE = 20, 3000


def gradient(rank, step):
    return np.random.RandomState([rank, step]).standard_normal(SIZE).astype(np.float32)


def total(workers, step):
    return sum(gradient(rank, step) for rank in range(workers))


def begin(compression_params, **sgd):
    """A store with one key, the array of its value, and a process's own weight."""
    store = mx.kv.create("p3")
    store.set_gradient_compression(compression_params)
    store.set_optimizer(mx.optimizer.SGD(**sgd))
    weight = mx.nd.ones(SIZE)
    store.init("w", weight)
    return store, weight, np.ones(SIZE, np.float64)


def values_are_exact_once_they_are_synchronised():
    store, weight, expected = begin({"type": "identity"}, learning_rate=0.5)
    averages = mx.nd.zeros(2)  # of this worker's own, as BatchNorm's: no gradient changes them
    store.broadcast("averages", averages, out=averages)
    averages[:] = 1 + store.rank
    for step in range(STEPS):
        store.pushpull("w", mx.nd.array(gradient(store.rank, step)), out=weight)
        expected -= 0.5 * total(store.num_workers, step)
        # The first value travels as it is.
        differ = np.count_nonzero(~np.isclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-4))
        assert step == 0 or differ > SIZE / 2, (step, differ)
        if step == STEPS // 2:
            store.synchronize()
            np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-4)
    copy = mx.nd.zeros(SIZE)
    store.pull("w", out=copy)
    store.synchronize()
    for array in (weight, copy):
        np.testing.assert_allclose(array.asnumpy(), expected, rtol=1e-4, atol=1e-4)
    assert (averages == 1 + store.rank).asnumpy().all(), averages
    before = store.stats()["bytes_received"]
    store.pushpull("w", mx.nd.zeros(SIZE), out=weight)
    mx.nd.waitall()
    received = store.stats()["bytes_received"] - before
    assert received < 4 * SIZE * 0.1, received
    print("values are exact")


def all_of_a_gradient_arrives():
    store, weight, expected = begin({"type": "topk", "share": 0.1}, learning_rate=0.5)
    for step in range(STEPS + 40):
        mine = gradient(store.rank, step) if step < STEPS else np.zeros(SIZE, np.float32)
        store.pushpull("w", mx.nd.array(mine), out=weight)
        if step < STEPS:
            expected -= 0.5 * total(store.num_workers, step)
    store.synchronize()
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-4)
    print("gradients arrive")


def dgc_with_a_share_of_1_is_sgd_with_momentum():
    store, weight, expected = begin(
        {"type": "dgc", "share": 1.0}, learning_rate=0.1, momentum=0.9, wd=0.03
    )
    momentum = np.zeros(SIZE)
    for step in range(STEPS):
        store.pushpull("w", mx.nd.array(gradient(store.rank, step)), out=weight)
        momentum = 0.9 * momentum - 0.1 * (total(store.num_workers, step) + 0.03 * expected)
        expected += momentum
    store.synchronize()
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-4)
    print("dgc is sgd")


def a_trainer_with_dgc_learns():
    store = mx.kv.create("p3")
    net = gluon.nn.Dense(40, in_units=60, use_bias=False)
    net.initialize(mx.init.Constant(0.0))
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=store,
        compression_params={"type": "dgc", "share": 0.05, "clip": 50.0, "warmup_steps": 4},
    )  # fmt: skip
    goal = mx.nd.array(np.random.RandomState(0).standard_normal((40, 60)).astype(np.float32))
    for step in range(400):
        random = np.random.RandomState([store.rank, step])
        inputs = mx.nd.array(random.standard_normal((32, 60)).astype(np.float32))
        with autograd.record():
            loss = ((net(inputs) - mx.nd.dot(inputs, goal.T)) ** 2).mean()
        loss.backward()
        trainer.step(1)
    store.synchronize()
    error = float((net.weight.data() - goal).norm().asscalar() / goal.norm().asscalar())
    assert error < 0.1, error
    print("dgc learns")


def dgc_warms_up_in_each_store():
    """Whatever the steps that others have made."""
    settings = {"type": "dgc", "share": 0.01, "warmup_steps": 4}
    store, weight, expected = begin(settings, learning_rate=1.0, momentum=0.5)
    store.pushpull("w", mx.nd.arange(1, SIZE + 1), out=weight)
    store.synchronize()
    changed = (weight.asnumpy() != expected).mean()
    assert 0.24 < changed < 0.26, changed
    print("dgc warms up")


def other_optimizers_are_refused():
    store = mx.kv.create("p3")
    store.set_gradient_compression({"type": "dgc"})
    for wrong in (
        mx.optimizer.Adam(),
        mx.optimizer.SGD(),
        mx.optimizer.SGD(momentum=0.9, clip_gradient=1),
    ):
        try:
            store.set_optimizer(wrong)
        except NotSupportedError as error:
            assert "SGD with momentum" in str(error), error
        else:
            raise AssertionError(wrong)
    print("others refused")


if "DMLC_ROLE" in os.environ:
    values_are_exact_once_they_are_synchronised()
    dgc_warms_up_in_each_store()
all_of_a_gradient_arrives()
dgc_with_a_share_of_1_is_sgd_with_momentum()
a_trainer_with_dgc_learns()
other_optimizers_are_refused()
mx.kv.create("p3")._barrier()
