"""Trains a sparse weight of a million rows beside a bias, and then pulls all rows, timed."""

import p3kv  # noqa: F401, I001
import time

import mxnet as mx
import numpy as np

SHAPE, TOUCHED = (1_000_001, 2), 5_000

store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.SGD(learning_rate=0.1))
weight = mx.nd.sparse.zeros("row_sparse", SHAPE)
if store.rank == 0:
    weight = mx.nd.sparse.row_sparse_array((mx.nd.zeros(SHAPE), np.arange(SHAPE[0])), SHAPE)
store.init("weight", weight)
bias = mx.nd.zeros(2)
store.broadcast("bias", bias, out=bias)
for step in range(8):
    rows = np.sort(np.random.RandomState(step).permutation(SHAPE[0])[:TOUCHED])
    gradient = mx.nd.sparse.row_sparse_array((mx.nd.ones((TOUCHED, 2)), rows), SHAPE)
    store.push("weight", gradient)
    store.pushpull("bias", mx.nd.ones(2), out=bias)
    bias.wait_to_read()
every, out = mx.nd.arange(SHAPE[0], dtype="int64"), mx.nd.sparse.zeros("row_sparse", SHAPE)
mx.nd.waitall()
taken_s = []
for _ in range(3):
    store._barrier()
    began = time.perf_counter()
    store.row_sparse_pull("weight", out=out, row_ids=every)
    out.wait_to_read()
    taken_s.append(time.perf_counter() - began)
print(f"pulled in {min(taken_s)} s", flush=True)
