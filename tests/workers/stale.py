"""Trains with a rule of a user's own: checks each value received, and goes ahead of a straggler.

Gradients do not depend on the weights, so the value after every round is known.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np

ROUNDS = 12
SIZE = 1000
STALENESS = 1

folder = Path(sys.argv[1])


def gradient(rank, round_):
    return np.random.RandomState([rank, round_]).randint(0, 9, SIZE).astype(np.float32)


def check(received, newest, needs):
    """Each element is of the value after one of the rounds from `needs` to `newest`."""
    found = received.asnumpy()
    allowed = np.array(expected[max(0, needs) : newest + 1])
    assert (found == allowed).any(axis=0).all(), (newest, needs)
    return (found == expected[newest]).all()


store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
rank, workers = store.rank, store.num_workers
expected = [np.ones(SIZE, np.float32)]
for round_ in range(1, ROUNDS + 1):
    expected.append(expected[-1] - sum(gradient(one, round_) for one in range(workers)))

value = mx.nd.zeros(SIZE)
store.broadcast("w", mx.nd.array(expected[0]), value)
mx.nd.waitall()
pushed = folder / "pushed"
if rank == 1:
    deadline = time.monotonic() + 20
    while not pushed.exists():
        assert time.monotonic() < deadline, "worker 0 did not go on without this one"
        time.sleep(0.01)
for round_ in range(1, ROUNDS + 1):
    store.pushpull("w", mx.nd.array(gradient(rank, round_)), out=value)
    if rank == 0 and round_ == 2:
        pushed.touch()  # worker 1 has not pushed for any round
        print("went on to round 2")
    check(value, round_, round_ - STALENESS)
    if round_ % 3 == rank:
        store.pull("w", out=value)
        check(value, min(ROUNDS, round_ + STALENESS), round_ - STALENESS)
store._barrier()
store.pull("w", out=value)
assert check(value, ROUNDS, ROUNDS), "the last value lacks a push"
print("every value is one that the rule allows")
