"""Trains a weight that is frozen when its Trainer is made, and one that never is.

Arguments: after how many steps worker 1 is killed in a job that begins (0: never), and in which
jobs the weight stays frozen: "none", or "resumed" for those that go on. Each step of a weight that
is not frozen adds -0.1.
"""

import p3kv  # noqa: F401, I001
import os
import signal
import sys

import mxnet as mx
from mxnet import autograd, gluon
from written import wait_for_checkpoint

STEPS = 6
dies_after, frozen = int(sys.argv[1]), sys.argv[2]


def weight(name: str) -> gluon.Parameter:
    one = gluon.Parameter(name, shape=(3,))
    one.initialize(mx.init.One())
    return one


store = mx.kv.create("p3")
resumed = store.resumed_steps
late, always = weight("late"), weight("always")
late.grad_req = "null"
trainer = gluon.Trainer([late, always], "sgd", {"learning_rate": 0.1}, kvstore=store)
if not (resumed and frozen == "resumed"):
    late.grad_req = "write"
for step in range(resumed, STEPS):
    with autograd.record():
        loss = (late.data() + always.data()).sum()
    loss.backward()
    trainer.step(store.num_workers)
    if not resumed and step + 1 == dies_after:
        mx.nd.waitall()
        if store.rank == 1:
            wait_for_checkpoint(files=2)
            os.kill(os.getpid(), signal.SIGKILL)
        store._barrier()
for one in (late, always):
    value = one.data().asnumpy()
    assert (value == value[0]).all()
    print(f"worker {store.rank} went on from {resumed}: {one.name} is {value[0]:.4f}")
store._barrier()
