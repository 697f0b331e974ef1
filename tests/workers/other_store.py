"""Trains one step with the store that the argument names ('none' for none), in a p3kv job."""

import p3kv  # noqa: F401, I001
import sys

import mxnet as mx
from mxnet import autograd, gluon

name = None if sys.argv[1] == "none" else sys.argv[1]
net = gluon.nn.Dense(3, in_units=2)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=name)
with autograd.record():
    loss = net(mx.nd.ones((1, 2))).sum()
loss.backward()
trainer.step(1)
print("trained")
