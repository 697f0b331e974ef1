"""Trains a row_sparse key of a gigabyte, of which workers pull and push some rows."""

import p3kv  # noqa: F401, I001
import resource

import mxnet as mx
import numpy as np

SHAPE, IDS = (4_000_000, 64), np.arange(8) * 100_000


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
before = resident_bytes()
store.init("table", mx.nd.sparse.zeros("row_sparse", SHAPE))
out = mx.nd.sparse.zeros("row_sparse", SHAPE)
gradient = mx.nd.sparse.row_sparse_array((mx.nd.ones((8, SHAPE[1])), IDS), SHAPE)
for step in range(3):
    store.push("table", gradient)
    store.row_sparse_pull("table", out=out, row_ids=mx.nd.array(IDS, dtype="int64"))
    right = -(step + 1) * store.num_workers
    assert (out.data.asnumpy() == right).all() and (out.indices.asnumpy() == IDS).all()
assert resident_bytes() - before < 100e6, resident_bytes() - before
print("little memory")
