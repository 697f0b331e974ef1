"""Pushes nan and infinity; with the argument 'stop' only in the end, as a job that ends on them."""

import p3kv  # noqa: F401, I001
import sys

import mxnet as mx
import numpy as np

INF, NAN = np.inf, np.nan
EXPECTED = [INF, NAN, NAN, -INF, 3.0]
MINE = ([INF, INF, NAN, 1.0, 1.0], [1.0, -INF, 1.0, -INF, 2.0])
"""The gradients of workers 0 and 1."""

rank = mx.kv.create("p3").rank
mine = np.array(MINE[rank])

if sys.argv[1:] == ["stop"]:
    store = mx.kv.create("p3")
    for key in ("a", "b"):
        # What is not finite at first is the script's own business.
        store.init(key, mx.nd.array([INF, NAN, 1.0]))
    out = mx.nd.zeros(3)
    for round_ in range(1, 4):
        store.pushpull("a", mx.nd.ones(3), out=out)
        bad = rank == 1 and round_ == 2
        store.pushpull("b", mx.nd.array([1.0, NAN if bad else 1.0, 1.0]), out=out)
        out.wait_to_read()
    raise AssertionError("nobody minds")

for dtype in ("float32", "float16"):
    sums = mx.kv.create("p3")
    out = mx.nd.zeros(5, dtype=dtype)
    sums.init("w", out)
    sums.pushpull("w", mx.nd.array(mine, dtype=dtype), out=out)
    np.testing.assert_array_equal(out.asnumpy(), EXPECTED)

    alone = mx.nd.ones(5, dtype=dtype)
    sgd = mx.optimizer.SGD(learning_rate=0.5, momentum=0.9)
    updater = mx.optimizer.get_updater(sgd)
    updated = mx.kv.create("p3")
    updated.set_optimizer(sgd)
    updated.init("w", alone)
    for _ in range(2):
        updated.pushpull("w", mx.nd.array(mine, dtype=dtype), out=out)
        updater("w", mx.nd.array(EXPECTED, dtype=dtype), alone)
        np.testing.assert_array_equal(out.asnumpy(), alone.asnumpy())

rows = mx.kv.create("p3")
rows.init("w", mx.nd.zeros((4, 5)).tostype("row_sparse"))
touched = mx.nd.sparse.row_sparse_array((mx.nd.array(mine[None]), [2]), (4, 5))
rows.push("w", touched)
out = mx.nd.sparse.zeros("row_sparse", (4, 5))
rows.row_sparse_pull("w", out=out, row_ids=mx.nd.arange(4))
np.testing.assert_array_equal(out.asnumpy()[2], EXPECTED)
np.testing.assert_array_equal(out.asnumpy()[:2], 0)
print("as in one process")
