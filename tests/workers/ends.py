"""Worker 1 ends while its gradients are not ready yet, as argument 1 says; worker 0 trains on.

Arguments: how (`raise`, `interrupt`, `interrupt_in_del`, `exit` with code 3 or `return`), and the
steps before it. With `other`, worker 1's script is over while its last step waits for worker 0,
which fails then; the third is a folder in which it says so.
"""

import p3kv  # noqa: F401, I001
import os
import signal
import sys
import threading
import time
from pathlib import Path

import mxnet as mx

from p3kv.frontends.mxnet import engine

_BACKWARD_S = 0.5


def backward(gradient: mx.nd.NDArray) -> None:
    """Leaves a gradient that becomes ready only later, as backward on a device does."""

    def start(operation: engine.Operation) -> None:
        timer = threading.Timer(_BACKWARD_S, operation.complete)
        timer.daemon = True
        timer.start()

    engine.push(start, [], [gradient])


class Interrupted:
    """Gets Ctrl-C while Python frees it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


how, steps = sys.argv[1], int(sys.argv[2])
store = mx.kv.create("p3")
weights = [mx.nd.zeros((40, 50)) for _ in range(3)]
gradients = [mx.nd.ones((40, 50)) for _ in range(3)]
for key, weight in enumerate(weights):
    store.broadcast(key, weight, out=weight)
for _ in range(steps + (how == "return" or 2 * (store.rank == (how == "other")))):
    for key in range(3):
        backward(gradients[key])
        store.pushpull(key, gradients[key], out=weights[key])
if how == "other":
    if store.rank == 1:
        print("trained")
        Path(sys.argv[3], "trained").touch()
        sys.exit()
    mx.nd.waitall()
    while not Path(sys.argv[3], "trained").exists():
        time.sleep(0.02)
    raise ValueError("there is no such label")
if store.rank == 1:
    if how == "raise":
        raise ValueError("there is no such label")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "interrupt_in_del":
        Interrupted()
    if how == "exit":
        sys.exit(3)
mx.nd.waitall()
print("all is here")
