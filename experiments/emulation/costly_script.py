"""A script that trains an emulated model of Parallax's without an end, for `p3kv tune`.

Arguments: the model and the dilation.
"""

from experiments.emulation.systems import SYSTEMS, import_p3kv

import_p3kv(SYSTEMS["p3kv"])

import sys  # noqa: E402

import mxnet as mx  # noqa: E402

from experiments.emulation.sparse_emulator import SparseEmulatedModel  # noqa: E402
from experiments.models.parallax import sparse_model  # noqa: E402

_STEPS = 100_000

store = mx.kv.create("p3")
model = SparseEmulatedModel(sparse_model(sys.argv[1]), store.rank, float(sys.argv[2]), False)
store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
model.broadcast(store)
try:
    model.run(store, _STEPS)
finally:
    mx.nd.waitall()
    model.close()
