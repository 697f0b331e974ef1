"""Some steps with rows, of which the workers touch the same ones and each some of its own; says how
many bytes the worker has sent and received for them.

Argument: `killed` ends worker 1 by SIGKILL in the third step.
"""

import p3kv  # noqa: F401, I001
import os
import signal
import sys

import mxnet as mx
import numpy as np

STEPS, ROWS, COLUMNS = 4, 6000, 16
OF_ALL, OWN = 400, 100

store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))


def touched(rank: int) -> np.ndarray:
    """Ascending, from all over the table."""
    return np.union1d(10 * np.arange(OF_ALL), 5 + 10 * (OWN * rank + np.arange(OWN)))


rows = touched(store.rank)
expected = np.zeros((ROWS, COLUMNS), np.float32)
everything = mx.nd.arange(ROWS, dtype="int64")
store.init("named", mx.nd.sparse.row_sparse_array((expected, everything), expected.shape))
weight = mx.nd.zeros(expected.shape)
weight.attach_grad(stype="row_sparse")
store.broadcast("changed", weight, out=weight)
some = mx.nd.sparse.zeros("row_sparse", expected.shape)
mx.nd.waitall()
before = store.stats()
for step in range(1, STEPS + 1):
    if step == 3 and store.rank == 1 and sys.argv[1:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    elements = np.full((len(rows), COLUMNS), store.rank + step, np.float32)
    gradient = mx.nd.sparse.row_sparse_array((elements, rows), expected.shape)
    store.push("named", gradient)
    store.row_sparse_pull("named", out=some, row_ids=mx.nd.array(rows, dtype="int64"))
    store.pushpull("changed", gradient, out=weight)
    mx.nd.waitall()
    for rank in range(store.num_workers):
        expected[touched(rank)] -= rank + step
    np.testing.assert_array_equal(some.indices.asnumpy(), rows)
    np.testing.assert_array_equal(some.data.asnumpy(), expected[rows])
    np.testing.assert_array_equal(weight.asnumpy(), expected)
after = store.stats()
sent, received = (after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
print(f"sent {sent} received {received} in {STEPS} steps", flush=True)
