"""Workers that declare the same key differently, and one more that has nothing to do with it."""

import p3kv  # noqa: F401, I001
import time

import mxnet as mx
from p3kv.errors import KeyMismatchError

SHAPES = {1: (3, 4)}
DTYPES = {1: "float64"}

store = mx.kv.create("p3")
start = time.monotonic()
try:
    if store.rank == 2:
        store._barrier()
    shape, dtype = SHAPES.get(store.rank, (4, 3)), DTYPES.get(store.rank, "float32")
    store.init("embedding", mx.nd.ones(shape, dtype=dtype))
    store._barrier()
except KeyMismatchError as error:
    print(f"learned within {time.monotonic() - start:.3f} s: {error}")
    raise
