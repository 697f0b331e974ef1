"""Trains by a codec that keeps something back, and goes on from a checkpoint where there is one.

Arguments: the file for the weights at the end; `compression_params`, in JSON; in one of how many
steps a parameter is trained, which is frozen in the others; then perhaps which process is to be
killed in mid-training, as in `continued.py`. What a worker has not sent yet is as large as what it
has.
"""

import p3kv  # noqa: F401, I001
import json
import sys
import time
from typing import List

import mxnet as mx
import numpy as np
from checks import random
from complete import Complete, kill
from mxnet import autograd, gluon

STEPS, FIRST_WRITTEN_IN, DIES_IN = 14, 5, 9
SHAPES = [(37, 23), (1,), (64,), (500,)]
SELDOM, EVERY = 2, int(sys.argv[3])


def train(trainer: gluon.Trainer, parameters: List[gluon.Parameter], step: int, rank: int) -> None:
    chosen = [i for i in range(len(SHAPES)) if i != SELDOM or step % EVERY == 0]
    for i, parameter in enumerate(parameters):
        parameter.grad_req = "write" if i in chosen else "null"
    with autograd.record():
        losses = []
        for i in chosen:  # what a worker lacks of a weight is in the next gradient
            linear = parameters[i].data() * mx.nd.array(random(SHAPES[i], i, step, rank))
            losses.append((linear + parameters[i].data() ** 2).sum())
    autograd.backward(losses)
    trainer.step(1)


def main() -> None:
    complete = Complete()
    parameters = []
    for i, shape in enumerate(SHAPES):
        parameter = gluon.Parameter(f"w{i}", shape=shape)
        parameter.initialize()
        parameter.set_data(mx.nd.array(random(shape, i)))
        parameters.append(parameter)
    store = mx.kv.create("p3")
    trainer = gluon.Trainer(
        parameters, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store,
        compression_params=json.loads(sys.argv[2]),
    )  # fmt: skip
    begun = store.resumed_steps
    print(f"begins after {begun} steps")
    for step in range(begun, STEPS):
        train(trainer, parameters, step, store.rank)
        if len(sys.argv) > 4 and not begun:
            if step == FIRST_WRITTEN_IN and store.rank == 0:
                complete.wait(1)
            if step == DIES_IN:
                mx.nd.waitall()
                if store.rank == 0:
                    complete.wait(2)
                    kill(sys.argv[4])
                store._barrier()
                time.sleep(60)  # until the store hears of it
    store.synchronize()
    if store.rank == 0:
        np.savez(sys.argv[1], **{one.name: one.data().asnumpy() for one in parameters})
    store._barrier()


main()
