"""Trains with many optimizers at once, and goes on from a checkpoint where there is one.

Arguments: the file for the weights at the end; then perhaps which process is to be killed in
mid-training, such as "server 0", or "all". Then it is killed as soon as a checkpoint is complete,
unless this run goes on from one. Every iteration makes a step with each of several Trainers, one of
which has sparse gradients, and with a store whose weight is row_sparse.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from typing import List

import mxnet as mx
import numpy as np
from checks import random
import resumed
from complete import Complete, kill
from mxnet import autograd, gluon
from resumed import CASES, Training

ITERATIONS, FIRST_WRITTEN_IN, DIES_IN = 14, 5, 9
resumed.SELDOM = 0
"""A step begins with the key that is trained in one of three."""
ROWS, COLUMNS = 23, 3


class Embedded:
    """A Trainer of a dense weight whose gradient is row_sparse."""

    def __init__(self) -> None:
        self.net = gluon.nn.Embedding(ROWS, COLUMNS, sparse_grad=True, prefix="rows_")
        self.net.initialize(mx.init.One())
        self.store = mx.kv.create("p3")
        self._trainer = gluon.Trainer(
            self.net.collect_params(), "adam", {"learning_rate": 0.1}, kvstore=self.store
        )

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            rows = mx.nd.array(touched(step, self.store.rank))
            with autograd.record():
                loss = (self.net(rows) * (1 + step)).sum()
            loss.backward()
            self._trainer.step(2)

    def weights(self) -> List[np.ndarray]:
        return [self.net.weight.data().asnumpy()]


class SparseWeight:
    """A script that calls the store itself; it sets the optimizer after the key has a value."""

    def __init__(self) -> None:
        self.store = mx.kv.create("p3")
        weight = mx.nd.array(random((ROWS, COLUMNS), 3)).tostype("row_sparse")
        self.store.init("w", weight)
        self.store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            rows = touched(step, self.store.rank)
            gradient = mx.nd.sparse.row_sparse_array(
                (random((len(rows), COLUMNS), step, self.store.rank), rows), (ROWS, COLUMNS)
            )
            self.store.push("w", gradient)

    def weights(self) -> List[np.ndarray]:
        out = mx.nd.sparse.zeros("row_sparse", (ROWS, COLUMNS))
        self.store.row_sparse_pull("w", out=out, row_ids=mx.nd.arange(ROWS))
        return [out.asnumpy()]


def touched(step: int, rank: int) -> np.ndarray:
    return np.unique(np.random.RandomState([step, rank]).randint(0, ROWS, 5))


def main() -> None:
    complete = Complete()
    mx.random.seed(5)
    trainings: dict = {}
    for name, case in CASES.items():
        begin = [random(shape, 5, dtype=case.dtype) for shape in case.shapes]
        trainings[name] = Training(name, begin)
    trainings["clipped"] = Training("momentum", trainings["momentum"].weights())
    trainings["clipped"].store.clip_global_norm(2.0)
    trainings["embedded"] = Embedded()
    trainings["sparse weight"] = SparseWeight()
    store = trainings["momentum"].store
    begun = store.resumed_steps
    assert all(one.store.resumed_steps == begun for one in trainings.values())
    if store.rank == 0:
        print(f"begins after {begun} iterations")
    for step in range(begun, ITERATIONS):
        for one in trainings.values():
            one.train(step, step + 1)
        dies = len(sys.argv) > 2 and not begun
        if dies and step == FIRST_WRITTEN_IN and store.rank == 0:
            complete.wait(1)
        if dies and step == DIES_IN:
            mx.nd.waitall()
            if store.rank == 0:
                complete.wait(2)
                kill(sys.argv[2])
            store._barrier()
            time.sleep(60)  # until the store hears of it
    if store.rank == 0:
        found = {
            f"{name} {i}": weight
            for name, one in trainings.items()
            for i, weight in enumerate(one.weights())
        }
        np.savez(sys.argv[1], **found)
    store._barrier()


if __name__ == "__main__":
    main()
