"""Trains with a rule of a user's own: checks each value received, and goes ahead of a straggler.

Gradients do not depend on the weights, so the value after every round is known. Arguments: a
folder, and "leaves" to end as soon as the last weight is there.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

ROUNDS = 12
SIZE = 2_000_000 if "leaves" in sys.argv else 1000
STALENESS = 1

folder = Path(sys.argv[1])


def gradient(rank, round_):
    return np.random.RandomState([rank, round_]).randint(0, 9, SIZE).astype(np.float32)


def check(received, round_):
    """The value is that after a round, whatever has arrived besides."""
    np.testing.assert_array_equal(received.asnumpy(), expected[max(0, round_)])


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
    if round_ == ROUNDS and "leaves" in sys.argv:  # with these gradients still on their way
        sys.exit()
    if rank == 0 and round_ == 2:
        pushed.touch()  # worker 1 has not pushed for any round
        print("went on to round 2")
    check(value, round_ - STALENESS)
    if round_ in (5, 9):  # on both workers, so no round ends that has not begun
        store.pull("w", out=value)
        check(value, round_)
store._barrier()
store.pull("w", out=value)
check(value, ROUNDS)
seen = store.stats()
assert (seen["stale_values"], seen["most_stale_rounds"]) == (ROUNDS, STALENESS), seen
assert seen["stale_rounds"] == ROUNDS * STALENESS, seen


def parameter(name):
    made = gluon.Parameter(name, shape=(9,))
    made.initialize(mx.init.Zero())
    return made


used, unused = parameter("used"), parameter("unused")
settings = {"learning_rate": 0.1, "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5)}
trainer = gluon.Trainer([used, unused], "sgd", settings, kvstore=mx.kv.create("p3"))
if rank == 1:  # worker 0 goes on without it, though a weight has no gradient
    store._barrier()
for step in range(5):
    with autograd.record():
        loss = used.data().sum()
    loss.backward()
    trainer.step(workers, ignore_stale_grad=True)
    if rank == 0 and step == STALENESS:
        store._barrier()
trainer._kvstore.synchronize()
np.testing.assert_allclose(used.data().asnumpy(), -0.1 * (2 + 2 * 0.5 + 0.25), rtol=1e-6)
print("every value is the one that the rule names")
