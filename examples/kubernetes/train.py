"""A small training for a first job in a cluster: each worker fits its part of a random data set."""

from __future__ import annotations

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import sys

import mxnet as mx
from mxnet import autograd, gluon

BATCH = 32

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
mx.random.seed(7)  # the same weights everywhere, also in the first step
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(1))
net.initialize(mx.init.Xavier())
kv = mx.kv.create("p3")
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
loss_of = gluon.loss.L2Loss()
mx.random.seed(100 + kv.rank)  # other data on each worker
first = last = 0.0
for _ in range(steps):
    data = mx.nd.random.uniform(-1, 1, (BATCH, 16))
    with autograd.record():
        loss = loss_of(net(data), data.sum(axis=1, keepdims=True)).mean()
    loss.backward()
    trainer.step(kv.num_workers)  # each worker's loss is a mean already
    last = loss.asscalar()
    first = first or last
print(f"worker {kv.rank} of {kv.num_workers}: loss {first:.3f} at first, {last:.3f} at last")
if last > first:
    sys.exit("the loss has not become smaller")
