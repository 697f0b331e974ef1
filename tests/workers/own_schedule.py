"""Trains by rounds of each worker's own with another rate in each step, and never waits for a value
meanwhile: the script is ahead of what it has pushed.

One worker must have what one process has, bit for bit. Of several, rates are whole numbers, and
gradients are units that say whose they are: worker 0's pushes count with the rates of their steps.
"""

import p3kv  # noqa: F401, I001
from typing import List, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

STEPS, UNIT = 20, 512.0


def trained(store: Optional[str]) -> List[np.ndarray]:
    """Weights of a model of two layers after all steps."""
    random = np.random.RandomState(7)
    net = gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(200, in_units=150), gluon.nn.Dense(5, in_units=200))
    net.initialize()
    for one in net.collect_params().values():
        one.set_data(mx.nd.array(random.randn(*one.shape) * 0.1))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=store)
    for step in range(1, STEPS + 1):
        with autograd.record():
            loss = (net(mx.nd.array(random.randn(8, 150))) ** 2).mean()
        loss.backward()
        trainer.set_learning_rate(0.1 / step)
        trainer.step(1)
    if store is not None:
        trainer._kvstore.synchronize()
    return [one.data().asnumpy() for one in net.collect_params().values()]


def counted(store: mx.kv.KVStore) -> None:
    """Each worker pushes without a wait; a pull at the end has all."""
    weight, gradient = mx.nd.zeros(300), mx.nd.ones(300) * UNIT**store.rank
    optimizer = mx.optimizer.SGD(learning_rate=0.0)
    store.set_optimizer(optimizer)
    store.broadcast("w", weight, weight)
    for step in range(1, STEPS + 1):
        optimizer.set_learning_rate(float(step))
        store.pushpull("w", gradient, out=weight)
    store.synchronize()
    mx.nd.waitall()
    store._barrier()
    store.pull("w", out=weight)
    (total,) = np.unique(-weight.asnumpy())
    assert total % UNIT == sum(range(1, STEPS + 1)), total % UNIT
    for rank in range(1, store.num_workers):
        of_rank = total // UNIT**rank % UNIT
        assert STEPS <= of_rank <= STEPS * STEPS, of_rank


store = mx.kv.create("p3")
if store.num_workers == 1:
    for ours, alone in zip(trained("p3"), trained(None)):
        np.testing.assert_array_equal(ours, alone)
counted(store)
store._barrier()
print("each push counts with its step's rate")
