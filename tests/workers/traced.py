"""Trains a few steps with gluon's Trainer; also with a row_sparse embedding.

Argument: how many seconds the monotonic clock of worker 1 is ahead of the others', or 0. Another
clock is that of another time namespace.
"""

import os
import sys

AHEAD_S = int(sys.argv[1])
if AHEAD_S and os.environ["DMLC_WORKER_ID"] == "1" and len(sys.argv) == 2:
    command = [sys.executable, __file__, str(AHEAD_S), "in the namespace"]
    os.execvp("unshare", ["unshare", "--time", "--monotonic", str(AHEAD_S), *command])

import p3kv  # noqa: E402, F401, I001
import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

STEPS = 6
WORDS = 200

net = gluon.nn.Sequential(prefix="")
net.add(gluon.nn.Embedding(WORDS, 16, sparse_grad=True, prefix="words_"))
for number in range(3):
    net.add(gluon.nn.Dense(256, activation="relu", flatten=number == 0, prefix=f"layer{number}_"))
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore="p3")
loss_of = gluon.loss.L2Loss()
for step in range(STEPS):
    data = mx.nd.array([[(step * 7 + place) % WORDS for place in range(16)]] * 32)
    with autograd.record():
        loss = loss_of(net(data), mx.nd.ones((32, 256)))
    loss.backward()
    trainer.step(64)
    loss.wait_to_read()
mx.nd.waitall()
