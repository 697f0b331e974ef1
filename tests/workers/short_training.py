"""Trains a few steps, like any script, and uses what only p3kv's store has.

Arguments: how many steps; before which one it fails, as a number or nothing.
"""

import os
import sys

import p3kv  # before mxnet

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon

STEPS = int(sys.argv[1])
FAILS = int(sys.argv[2]) if len(sys.argv) > 2 else None

p3kv.configure(checkpoint_dir="checkpoints of a short training")
store = mx.kv.create("p3")
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(50, in_units=20), gluon.nn.Dense(5, in_units=50))
net.initialize()
on_servers = os.environ.get("MXNET_UPDATE_ON_KVSTORE") != "0"
if on_servers:
    store.clip_global_norm(1.0)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
for step in range(1, STEPS + 1):
    if step == FAILS:
        sys.exit(3)
    with autograd.record():
        loss = net(mx.nd.ones((4, 20))).square().sum()
    loss.backward()
    trainer.step(4 + step % 2)
    print(f"step {step}: norm {store.global_norm()}, {store.stats().get('steps')} steps")
    if on_servers:
        trainer.save_states("states of a short training")
