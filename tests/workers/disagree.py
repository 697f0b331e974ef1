"""Workers that declare the same key differently, and one more that has nothing to do with it.

Argument: in what they differ, 'shape' or 'compression'.
"""

import p3kv  # noqa: F401, I001
import sys
import time

import mxnet as mx
from p3kv.errors import KeyMismatchError

COMPRESSED = sys.argv[1] == "compression"
SHAPES = {} if COMPRESSED else {1: (3, 4)}
DTYPES = {} if COMPRESSED else {1: "float64"}
THRESHOLDS = {1: 0.25}

store = mx.kv.create("p3")
start = time.monotonic()
try:
    if store.rank == 2:
        store._barrier()
    shape, dtype = SHAPES.get(store.rank, (4, 3)), DTYPES.get(store.rank, "float32")
    if COMPRESSED:
        threshold = THRESHOLDS.get(store.rank, 0.5)
        store.set_gradient_compression({"type": "2bit", "threshold": threshold})
    store.init("embedding", mx.nd.ones(shape, dtype=dtype))
    store._barrier()
except KeyMismatchError as error:
    print(f"learned within {time.monotonic() - start:.3f} s: {error}")
    raise
