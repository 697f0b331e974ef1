"""Uses the store as in a job, in a process that belongs to none; weights are compared exactly."""

import p3kv  # noqa: F401, I001
from functools import partial
import tempfile

import mxnet as mx
import numpy as np
import owners
import pytest
from checks import equal, random
from mxnet import autograd, gluon

from p3kv.errors import ConfigError, KeyMismatchError, NotSupportedError


def trained(store: object, update_on_kvstore: object) -> list:
    mx.random.seed(3)
    net = gluon.nn.HybridSequential(prefix="alone_")
    with net.name_scope():
        net.add(gluon.nn.Dense(7, in_units=5, activation="tanh"), gluon.nn.Dense(2, in_units=7))
    net.initialize()
    trainer = gluon.Trainer(
        net.collect_params(), "adam", kvstore=store, update_on_kvstore=update_on_kvstore
    )
    for step in range(5):
        if step == 3:
            trainer.set_learning_rate(0.05)
            with tempfile.NamedTemporaryFile() as states:
                trainer.save_states(states.name)
                trainer.load_states(states.name)
        with autograd.record():
            loss = (net(mx.nd.array(random((4, 5), step))) ** 2).sum()
        loss.backward()
        trainer.step(4 + step % 2)
    return [p.data().asnumpy() for p in net.collect_params().values()]


expected = trained(None, None)
for store in ("p3", "dist_sync_p3"):
    for update_on_kvstore in (None, True, False):
        for weight, wish in zip(trained(store, update_on_kvstore), expected):
            equal(mx.nd.array(weight), wish)

for weight, wish in zip(trained("dist_async_p3", None), expected):
    equal(mx.nd.array(weight), wish)
for name, kind in (
    ("dist_async_p3", "dist_async_p3"),
    ("p3:asynchronous", "dist_async_p3"),
    ("p3:local:steps=5", "dist_sync_p3"),
):
    assert mx.kv.create(name).type == kind

kv = mx.kv.create("p3")
for _ in range(2):  # two Trainers that are given the same store
    for weight, wish in zip(trained(kv, None), expected):
        equal(mx.nd.array(weight), wish)

for check in owners.CHECKS:
    check(mx.kv.create("p3"))

kv = mx.kv.create("p3")
assert (kv.type, kv.rank, kv.num_workers) == ("dist_sync_p3", 0, 1)
assert (kv.local_rank, kv.local_size) == (0, 1)
assert (kv.stats()["steps"], kv.stats()["verdict"], kv.forward_order) == (0, None, [])
kv.init("w", mx.nd.ones(3))
value = mx.nd.full(3, 2)
kv.pushpull("w", value)
equal(value, 2 * mx.nd.ones(3).asnumpy())
kv._barrier()

kv = mx.kv.create("p3")
kv.set_gradient_compression({"type": "2bit", "threshold": 1})
kv.init("w", mx.nd.array([0.3, 0.7, 5]))
kv.pull("w", out=value)
equal(value, np.float32([0.3, 0.7, 5]))
for expected in ([0, 1, -1], [1, 1, -1], [0, 1, -1]):  # what is not sent is kept by element
    value = [mx.nd.array([0.25, 1, -1.5]), mx.nd.array([0.25, 0.25, -0.5])]
    kv.pushpull("w", value)
    equal(value[1], np.float32(expected))
kv = mx.kv.create("p3")
kv.set_gradient_compression({"type": "float16"})
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1))
kv.init("rows", mx.nd.ones((4, 2)).tostype("row_sparse"))
third = mx.nd.sparse.row_sparse_array((np.float32([[1 / 3] * 2]), [2]), (4, 2))
kv.push("rows", [third, mx.nd.sparse.zeros("row_sparse", (4, 2))])
value = mx.nd.sparse.zeros("row_sparse", (4, 2))
kv.row_sparse_pull("rows", out=value, row_ids=mx.nd.array([1, 2]))
equal(value.data, np.float32([[1] * 2, [1 - np.float32(np.float16(1 / 3))] * 2]))
kv = mx.kv.create("p3")
kv.set_gradient_compression({"type": "2bit"})
kv.init("rows", value)
with pytest.raises(NotSupportedError, match="with a sparse gradient: what is left of a row"):
    kv.push("rows", third)


def clipped(store: object) -> list:
    """Trains with the norm of all gradients at most 0.1; without a store, as one process clips."""
    mx.random.seed(3)
    net = gluon.nn.HybridSequential(prefix="clipped_")
    net.add(gluon.nn.Dense(7, in_units=5), gluon.nn.Dense(2, in_units=7))
    net.initialize()
    parameters = list(net.collect_params().values())
    trainer = gluon.Trainer(parameters, "adam", kvstore=store)
    norms = []
    for step in range(3):
        with autograd.record():
            loss = (net(mx.nd.array(random((4, 5), step))) ** 2).sum()
        loss.backward()
        if store is None:
            norms.append(gluon.utils.clip_global_norm([p.grad() for p in parameters], 0.1))
        trainer.step(4)
        if store is not None:
            norms.append(store.global_norm())
    return [np.array(norms), *(p.data().asnumpy() for p in parameters)]


kv = mx.kv.create("p3")
kv.clip_global_norm(0.1)
for found, wish in zip(clipped(kv), clipped(None)):
    np.testing.assert_array_equal(found, wish)
kv = mx.kv.create("p3")
kv.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
kv.init([0, 1], [mx.nd.zeros(2)] * 2)
kv.clip_global_norm(5)
kv.push([0, 1], [mx.nd.array([6, 0]), mx.nd.array([0, 8])])
value = mx.nd.zeros(2)
kv.pull(1, out=value)
equal(value, np.float32([0, 4]))
kv.push(0, mx.nd.ones(2))
with pytest.raises(NotSupportedError, match="a whole step"):
    kv.push(1, mx.nd.ones(2))
for call, told in [
    (partial(kv.clip_global_norm, -1), "must be a number above 0"),
    (partial(kv.set_gradient_compression, {"type": "2bit"}), "has keys already"),
    (partial(mx.kv.create("p3").set_gradient_compression, {"type": "1bit"}), "no codec '1bit'"),
    (
        partial(mx.kv.create("p3").set_gradient_compression, {"type": "fp16"}),
        "compression_params has 'fp16' as 'type'",
    ),
    (partial(mx.kv.create("p3").set_gradient_compression, {"type": "fp16"}), "mean 'float16'?"),
]:
    with pytest.raises(ConfigError, match=told):
        call()
kv = mx.kv.create("p3")
many = mx.nd.sparse.zeros("row_sparse", (2**11 + 2, 1))
kv.init("many", many)
kv.row_sparse_pull("many", out=many, row_ids=mx.nd.array([2**11 + 1]))
for dtype, number in (("float16", 1), ("float32", 1.5), ("int64", -1)):
    with pytest.raises(KeyMismatchError, match="'many'"):
        kv.row_sparse_pull("many", out=many, row_ids=mx.nd.array([number], dtype=dtype))
layer = gluon.nn.Dense(2, in_units=3)
layer.initialize()
trainer = gluon.Trainer(layer.collect_params(), "sgd", kvstore="p3")
with autograd.record():
    loss = layer(mx.nd.ones((1, 3))).sum()
loss.backward()
trainer.step(1)
for change in (
    partial(layer.weight.set_data, mx.nd.ones((2, 3))),
    partial(layer.initialize, force_reinit=True),
):
    with pytest.raises(NotSupportedError, match="a new Trainer"):
        change()
print("all weights are right")
