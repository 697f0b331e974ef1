"""Trains two dense layers with gluon, without an end; argument: seconds to compute in a step."""

import sys
import time

import p3kv  # noqa: F401  before mxnet

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon

COMPUTE_S = float(sys.argv[1])

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(200, in_units=100), gluon.nn.Dense(100, in_units=200))
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore="p3")
while True:
    with autograd.record():
        loss = net(mx.nd.ones((1, 100))).square().mean()
    loss.backward()
    time.sleep(COMPUTE_S)
    trainer.step(1)
    mx.nd.waitall()
