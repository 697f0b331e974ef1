"""Trains a model of which it is known what limits it, and prints that and what the store says.

Arguments: a cause; how many iterations; seconds of computing in each; seconds that the cause takes
in each. Causes: "link" (nothing more), "data" (the script sleeps before each forward pass),
"computing", "straggler" (worker 1 computes longer), "server" (see `slow_optimizer.py`), and "cores"
(the script computes in Python, and so may do others on its processor).
"""

import json
import sys
import time

import p3kv  # noqa: F401  before mxnet

import mxnet as mx  # isort: skip
import slow_optimizer  # isort: skip

from experiments.emulation.emulator import EmulatedModel
from p3kv.report.forecast import Layer, Model, Parameter

CAUSE, ITERATIONS, COMPUTE_S, MORE_S = (
    sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
)  # fmt: skip
_LAYERS, _ELEMS, _WARM_UP = 24, 20_000, 3

store = mx.kv.create("p3")
parameters = [Parameter(f"layer{number}_weight", (_ELEMS,)) for number in range(_LAYERS)]
layers = [Layer(one.name, (one,), 1.0) for one in parameters]
own_s = COMPUTE_S + MORE_S * (CAUSE == "straggler" and store.rank == 1)
model = EmulatedModel(Model("small", 1, own_s, tuple(layers), tuple(parameters)))
store.name_keys(dict(enumerate(parameter.name for parameter in parameters)))
if CAUSE == "server":
    store.set_optimizer(slow_optimizer.Slow(MORE_S / _LAYERS, learning_rate=0.1))
else:
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
model.broadcast(store)


def compute() -> None:
    """In Python, for so much time of a processor."""
    until_s = time.thread_time() + MORE_S
    while time.thread_time() < until_s:
        pass


began_s, cpu_s, before = 0.0, 0.0, {}
for number in range(ITERATIONS + 1):
    if number in (_WARM_UP, ITERATIONS):
        before, began_s, cpu_s, after, since_s, since_cpu_s = (
            store.stats(), time.monotonic(), time.thread_time(), before, began_s, cpu_s
        )  # fmt: skip
    if number == ITERATIONS:
        break
    if CAUSE == "data":
        model.wait()  # as a script that reads its loss
        time.sleep(MORE_S)
    if CAUSE == "cores":
        model.wait()
        with mx.autograd.record():
            compute()
    model.iteration(store)
model.wait()
stats = store.stats()
step_s = (began_s - since_s) / (ITERATIONS - _WARM_UP)
waited = 1 - COMPUTE_S / step_s
truth = {
    "link": ("network", waited),
    "data": ("script", MORE_S / step_s),
    "computing": ("computing", COMPUTE_S / step_s),
    "straggler": ("straggler", waited),
    "server": ("server", waited),
    "cores": ("processor", 1 - (cpu_s - since_cpu_s) / (began_s - since_s)),
}
steps = before["step_s"] - after["step_s"]
told = {
    "rank": store.rank, "step_s": step_s, "truth": truth[CAUSE],
    "shares": {
        part: (before[f"{part}_s"] - after[f"{part}_s"]) / steps
        for part in ("computing", "script", "network", "server", "straggler", "processor")
    },
    "stats": stats,
}  # fmt: skip
print(json.dumps(told), flush=True)
mx.nd.waitall()
model.close()
