"""Pushes a gradient that has a row twice."""

import p3kv  # noqa: F401, I001
import mxnet as mx

store = mx.kv.create("p3")
store.init("w", mx.nd.ones((5, 2)).tostype("row_sparse"))
store.push("w", mx.nd.sparse.row_sparse_array((mx.nd.ones((2, 2)), [1, 1]), (5, 2)))
out = mx.nd.zeros((5, 2))
store.pull("w", out=out)
out.wait_to_read()
