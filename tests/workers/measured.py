"""Trains an emulated model and prints what it has waited for, and what the store has measured.

Arguments: how many iterations, seconds of compute in each, and seconds that this worker, if its
rank is 1, computes more.
"""

import json
import sys
import time

import p3kv  # noqa: F401  before mxnet

import mxnet as mx  # isort: skip

from experiments.emulation.emulator import EmulatedModel
from p3kv.report.forecast import Layer, Model, Parameter

ITERATIONS, COMPUTE_S, MORE_S = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
_LAYERS, _ELEMS = 8, 65_536

store = mx.kv.create("p3")
parameters = [Parameter(f"layer{number}_weight", (_ELEMS,)) for number in range(_LAYERS)]
layers = [Layer(one.name, (one,), 1.0) for one in parameters]
compute_s = COMPUTE_S + MORE_S * (store.rank == 1)
model = EmulatedModel(Model("small", 1, compute_s, tuple(layers), tuple(parameters)))
store.name_keys(dict(enumerate(parameter.name for parameter in parameters)))
store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
model.broadcast(store)
iteration_s = model.run(store, ITERATIONS)[1:]
time.sleep(0.0 if len(sys.argv) < 5 else float(sys.argv[4]))  # a sign of life tells of lags
waiting_s = sum(iteration_s) - compute_s * len(iteration_s)
told = {"rank": store.rank, "waited": waiting_s / sum(iteration_s), "stats": store.stats()}
print(json.dumps(told), flush=True)
mx.nd.waitall()
model.close()
