"""What all workers must call, and one calls alone, or otherwise. Arguments: which of these, and a
folder."""

import p3kv  # noqa: F401  isort: skip
import sys

import mxnet as mx
from mxnet import autograd, gluon, nd

case, folder = sys.argv[1:]
kv = mx.kv.create("p3")
mine = kv.rank == 0
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(2, in_units=4))
if case == "deeper" and not mine:
    net.add(gluon.nn.Dense(2, in_units=2))
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=kv)
for step in range(2):
    if step == 1 and mine:
        trainer.load_states(f"{folder}/states")  # alone
    with autograd.record():
        loss = net(nd.ones((1, 4))).sum()
    loss.backward()
    trainer.step(2)
    if step == 0 and mine:
        trainer.save_states(f"{folder}/states")
if case == "load":
    print(net(nd.ones((1, 4))).sum().asscalar())  # waits
print("trained")
