"""Trains a weight of which only some steps have a fresh gradient, and one of which all have.

Argument: how it goes on. "killed": worker 1 is killed after 5 steps in a job that begins. "left":
worker 1 ends after 3 steps. Each worker's fresh gradient is 1, the rate is 0.1, and the batch that
of all workers. `GRADIENTS` says in which steps which worker uses the first weight.
"""

import p3kv  # noqa: F401, I001
import os
import signal
import sys

import mxnet as mx
from mxnet import autograd, gluon
from written import wait_for_checkpoint

GRADIENTS = ["01", "", "0", "", "1", "", "0", "01"]
how = sys.argv[1]


def weight(name: str) -> gluon.Parameter:
    one = gluon.Parameter(name, shape=(3,))
    one.initialize(mx.init.One())
    return one


store = mx.kv.create("p3")
resumed = store.resumed_steps
seldom, always = weight("seldom"), weight("always")
trainer = gluon.Trainer([seldom, always], "sgd", {"learning_rate": 0.1}, kvstore=store)
for step in range(resumed, len(GRADIENTS)):
    if how == "left" and store.rank == 1 and step == 3:
        break
    with autograd.record():
        loss = always.data().sum()
        if str(store.rank) in GRADIENTS[step]:
            loss = loss + seldom.data().sum()
    loss.backward()
    trainer.step(2, ignore_stale_grad=True)
    if how == "killed" and not resumed and step + 1 == 5:
        mx.nd.waitall()
        if store.rank == 1:
            wait_for_checkpoint(files=1)
            os.kill(os.getpid(), signal.SIGKILL)
        store._barrier()
for one in (seldom, always):
    print(f"worker {store.rank} from {resumed}: {one.name} is {one.data().asnumpy()[0]:.4f}")
