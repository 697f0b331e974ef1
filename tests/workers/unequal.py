"""Trains with another number of batches on each worker; the others go on when one has left.

Gradients do not depend on the weights, so each value is known.
"""

import p3kv  # noqa: F401, I001
import copy
import sys
from pathlib import Path

import mxnet as mx
import numpy as np

BATCHES = (5, 8, 11)
SHAPES = {"a": (3000,), "b": (40, 50)}
ROWS = (6, 4)

store = mx.kv.create("p3")
rank = store.rank


def gradient(key, worker, round_, shape):
    """Whole numbers, whose sums are exact."""
    seed = np.random.RandomState([ord(key), worker, round_])
    return seed.randint(-9, 9, shape).astype(np.float32)


def total(key, round_, shape):
    """The sum over the workers that are there."""
    there = [worker for worker, most in enumerate(BATCHES) if round_ <= most]
    return sum(gradient(key, worker, round_, shape) for worker in there)


class Beside:
    """Keys with an optimizer on the servers, and the same in this process."""

    def __init__(self, kv, optimizer):
        self._kv = kv
        # One of its own: an optimizer counts what the servers update, too.
        self._updater = mx.optimizer.get_updater(copy.deepcopy(optimizer))
        self._alone = {key: mx.nd.ones(shape) for key, shape in SHAPES.items()}
        self._mine = {key: mx.nd.zeros(shape) for key, shape in SHAPES.items()}
        kv.set_optimizer(optimizer)
        for key, shape in SHAPES.items():
            kv.init(key, mx.nd.ones(shape))

    def step(self, round_):
        for key, shape in SHAPES.items():
            mine = mx.nd.array(gradient(key, rank, round_, shape))
            self._kv.pushpull(key, mine, out=self._mine[key])
        for key, shape in SHAPES.items():
            self._updater(key, mx.nd.array(total(key, round_, shape)), self._alone[key])
            found, expected = self._mine[key].asnumpy(), self._alone[key].asnumpy()
            np.testing.assert_array_equal(found, expected)


by_slices = Beside(store, mx.optimizer.Adam(learning_rate=0.1))
by_tensors = Beside(mx.kv.create("p3"), mx.optimizer.LAMB(learning_rate=0.1))
sums = mx.kv.create("p3")
sums.init("w", mx.nd.zeros(ROWS).tostype("row_sparse"))
for round_ in range(1, BATCHES[rank] + 1):
    by_slices.step(round_)
    by_tensors.step(round_)
    mine = mx.nd.array(gradient("w", rank, round_, ROWS)).tostype("row_sparse")
    out = mx.nd.sparse.zeros("row_sparse", ROWS)
    sums.push("w", mine)
    sums.row_sparse_pull("w", out=out, row_ids=mx.nd.arange(ROWS[0]))
    np.testing.assert_array_equal(out.asnumpy(), total("w", round_, ROWS))
    if round_ == 6:
        store._barrier()  # worker 0 has left, or is about to
if rank == len(BATCHES) - 1:
    store.save_optimizer_states(str(Path(sys.argv[1]) / "states"))
print(f"{BATCHES[rank]} batches")
