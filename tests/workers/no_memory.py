"""Worker rank 1 pushes a gradient for which its process can get no memory any more."""

import p3kv  # noqa: F401, I001
import resource
from pathlib import Path

import mxnet as mx
from mxnet.ndarray.ndarray import _new_alloc_handle

LARGE = 2**26  # elements: 256 MiB
SPARE_BYTES = 32 * 2**20

store = mx.kv.create("p3")
weight = mx.nd.zeros(LARGE)
store.init("weight", weight)
mx.nd.waitall()

gradient = mx.nd.ones(LARGE)
if store.rank == 1:
    # MXNet allocates it when somebody asks for its memory.
    gradient = mx.nd.NDArray(_new_alloc_handle((LARGE,), mx.cpu(), delay_alloc=True))
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + SPARE_BYTES,) * 2)
store.pushpull("weight", gradient, out=weight)
weight.wait_to_read()
