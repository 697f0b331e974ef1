"""Trains a model whose computation is emulated, without an end.

Arguments: seconds of compute in each step, and how many elements each of the layers has.
"""

import sys

import p3kv  # noqa: F401  before mxnet

import mxnet as mx  # isort: skip

from experiments.emulation.emulator import EmulatedModel
from p3kv.report.forecast import Layer, Model, Parameter

COMPUTE_S = float(sys.argv[1])
SIZES = [int(elems) for elems in sys.argv[2].split(",")]
_STEPS = 100_000

store = mx.kv.create("p3")
parameters = [Parameter(f"layer{n}_weight", (elems,)) for n, elems in enumerate(SIZES)]
layers = [Layer(one.name, (one,), 1.0) for one in parameters]
model = EmulatedModel(Model("small", 1, COMPUTE_S, tuple(layers), tuple(parameters)))
store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
model.broadcast(store)
try:
    model.run(store, _STEPS)
finally:
    mx.nd.waitall()
    model.close()
