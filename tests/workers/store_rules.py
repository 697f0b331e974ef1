"""Stores and Trainers with rules of their own in one job. Gradients do not depend on the weights,
so each weight is known after each step.

Argument, if any: "disagrees" has worker 1 choose another rule than worker 0.
"""

import p3kv  # noqa: F401, I001
import os
import sys

import mxnet as mx
import numpy as np
import pytest
from p3kv.errors import ConfigError

STEPS, SIZE, STALENESS = 8, 50, 2
LOCAL = "p3:local:steps=2,streaming=false,rate=1,momentum=0"


def gradient(step: int, rank: int) -> np.ndarray:
    return np.random.RandomState([step, rank]).randint(0, 9, SIZE).astype(np.float32)


def has(array: mx.nd.NDArray, value: np.ndarray) -> None:
    np.testing.assert_array_equal(array.asnumpy(), value)


if "disagrees" in sys.argv:
    store = mx.kv.create(f"p3:delayed:staleness={1 + int(os.environ['DMLC_WORKER_ID'])}")
    store.init("w", mx.nd.zeros(SIZE))

for name, why in (
    ("p3:delayd", "there is no consistency 'delayd'"),
    ("p3:", "there is no consistency ''"),
    ("p3:delayed:staleness=x", "staleness='x'; it must be a whole number"),
    ("dist_async_p3:delayed", "has two rules: write kvstore='p3:delayed'"),
):
    with pytest.raises(ConfigError, match=why):
        mx.kv.create(name)

names = ("p3", f"dist_sync_p3:delayed:staleness={STALENESS}", LOCAL, "P3:bounded:staleness=1")
stores = [mx.kv.create(name) for name in names]
assert [one.type for one in stores] == ["dist_sync_p3"] * 3 + ["dist_async_p3"]
rank, workers = stores[0].rank, stores[0].num_workers
weights = [mx.nd.zeros(SIZE) for _ in stores]
for store, weight in zip(stores, weights):
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    store.broadcast("w", weight, weight)
same, late, own, ahead = weights
after = [np.zeros(SIZE, np.float32)]
for step in range(1, STEPS + 1):
    every = [gradient(step, one) for one in range(workers)]
    after.append(after[-1] - sum(every))
    for store, weight in zip(stores, weights):
        store.pushpull("w", mx.nd.array(every[rank]), out=weight)
    has(same, after[step])
    has(late, after[max(0, step - STALENESS)])
    mine = after[step] / workers if step % 2 == 0 else after[step - 1] / workers - every[rank]
    has(own, mine)  # the mean of what workers learn
stores[3].pushpull("w", mx.nd.zeros(SIZE), out=ahead)
has(ahead, after[STEPS])

# Two Trainers that are given one store, and one that is given its name.
given = mx.kv.create("p3:delayed:staleness=3")
for store in (given, given, "p3:delayed:staleness=3"):
    net = mx.gluon.nn.Dense(1, in_units=SIZE, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore=store)
    for step in range(1, STEPS + 1):
        with mx.autograd.record():
            loss = net(mx.nd.array(gradient(step, rank).reshape(1, SIZE)))
        loss.backward()
        trainer.step(1)
        has(net.weight.data()[0], after[max(0, step - 3)])
    assert trainer._kvstore.consistency == "delayed:staleness=3"
print("every weight is right by its rule")
