"""Some steps with several keys; says how many bytes the worker has sent and received for them.

Argument: `killed` ends worker 1 by SIGKILL in the third step; with `private` no other process may
open what belongs to a worker. With `fifo` worker 1 shares a FIFO in place of memory, and with
`shrinks` memory that it has shortened.
"""

import p3kv  # noqa: F401, I001
import ctypes
import fcntl
import os
import signal
import sys
import tempfile

import mxnet as mx
import numpy as np

from p3kv.worker.routes.host_memory import OwnMemory

PR_SET_DUMPABLE = 4
STEPS = 5
SHAPES = [(300_000,), (40, 50), (7,), (100_000,), (3, 3)]

if sys.argv[1:] == ["private"]:
    if not os.getuid():
        os.setuid(65534)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
store = mx.kv.create("p3")
if store.rank == 1 and sys.argv[1:] in (["fifo"], ["shrinks"]):
    take = OwnMemory.take

    def take_wrong(self, size_bytes):
        memory, place = take(self, size_bytes)
        if sys.argv[1:] == ["fifo"]:
            with tempfile.TemporaryDirectory() as folder:
                os.mkfifo(f"{folder}/fifo")
                wrong = os.open(f"{folder}/fifo", os.O_RDONLY | os.O_NONBLOCK)
        else:
            wrong = os.memfd_create("p3kv", os.MFD_ALLOW_SEALING)
            os.ftruncate(wrong, place.offset + size_bytes)
            fcntl.fcntl(wrong, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        return memory, type(place)(place.pid, wrong, place.offset, size_bytes)

    OwnMemory.take = take_wrong
store.set_optimizer(mx.optimizer.create("test"))
weights = [mx.nd.zeros(shape) for shape in SHAPES]
for key, weight in enumerate(weights):
    store.broadcast(key, weight, out=weight)
mx.nd.waitall()
before = store.stats()
for step in range(1, STEPS + 1):
    if step == 3 and store.rank == 1 and sys.argv[1:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    for key, weight in enumerate(weights):
        store.pushpull(key, mx.nd.full(weight.shape, store.rank + step), out=weight)
    mx.nd.waitall()
after = store.stats()
sent, received = (after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
size = STEPS * sum(weight.size * 4 for weight in weights)
print(f"sent {sent} received {received} of {size}", flush=True)
total = sum(rank + step for rank in range(store.num_workers) for step in range(1, STEPS + 1))
for weight in weights:
    np.testing.assert_array_equal(weight.asnumpy(), np.full(weight.shape, total, np.float32))
