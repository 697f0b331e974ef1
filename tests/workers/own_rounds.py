"""Trains by rounds of each worker's own with gluon's Trainers, and goes on from a checkpoint where
there is one.

The last worker is slow, and the first one begins late: what others push before has its batch size,
which comes with its first step. Each gradient is a number that says whose it is, so a weight that
SGD trains tells how many pushes of each worker it has; another is trained by Adam. Argument: after
how many steps to end, when two checkpoints are complete, unless after all.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from typing import List

import mxnet as mx
import numpy as np
from complete import Complete
from mxnet import autograd, gluon

STEPS, UNIT, BATCH = 17, 64.0, 4
LAST = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS


def parameter(name: str, size: int) -> gluon.Parameter:
    made = gluon.Parameter(name, shape=(size,))
    made.initialize(mx.init.Zero())
    return made


def main() -> None:
    complete = Complete()
    counts, other = parameter("counts", 40), parameter("other", 62)
    stores = [mx.kv.create("p3") for _ in range(2)]
    sgd = gluon.Trainer([counts], "sgd", {"learning_rate": 1.0}, kvstore=stores[0])
    adam = gluon.Trainer([other], "adam", {"learning_rate": 0.01}, kvstore=stores[1])
    store = stores[0]
    rank, workers = store.rank, store.num_workers

    def pushes() -> List[List[int]]:
        """By slice and rank, how many pushes the weight has."""
        found = np.unique(-counts.data().asnumpy()).tolist()
        return [[int(one // UNIT**rank % UNIT) for rank in range(workers)] for one in found]

    begun = store.resumed_steps
    # All workers begin with all that belongs to the checkpoint, and with nothing more.
    assert pushes() == [[begun] * workers], pushes()
    store._barrier()
    if rank == 0:
        time.sleep(0.3)
    for step in range(begun + 1, LAST + 1):
        if rank == workers - 1:
            time.sleep(0.05)
        with autograd.record():
            losses = [
                (counts.data() * UNIT**rank * BATCH).sum(),
                ((other.data() - 1) ** 2).sum(),
            ]
        autograd.backward(losses)
        for trainer in (sgd, adam):
            trainer.step(BATCH)
        assert all(one[rank] == step for one in pushes()), pushes()
        if LAST < STEPS and rank == 0 and step in (6, LAST):
            complete.wait(2 if step == LAST else 1)
    store._barrier()
    store.synchronize()
    assert pushes() == [[LAST] * workers], pushes()
    print(f"all pushes count once, after {begun} steps")


main()
