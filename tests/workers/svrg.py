"""Trains a line with MXNet's SVRGModule, and prints how it ended."""

import p3kv  # noqa: F401, I001
import mxnet as mx
import numpy as np
from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule

from p3kv.errors import NotSupportedError

ROWS, TRUE = 64, np.array([[2.0, -3.0]], np.float32)

store = mx.kv.create("p3")
x = np.random.RandomState(store.rank).standard_normal((ROWS, 2)).astype(np.float32)
line = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, no_bias=True, name="line")
symbol = mx.sym.LinearRegressionOutput(line, mx.sym.Variable("label"))
module = SVRGModule(symbol, label_names=["label"], update_freq=2)
try:
    module.fit(
        mx.io.NDArrayIter(x, x @ TRUE.T, 16, label_name="label"),
        kvstore=store, num_epoch=10, eval_metric="mse", initializer=mx.init.Zero(),
        optimizer="sgd", optimizer_params={"learning_rate": 0.3},
    )  # fmt: skip
except NotSupportedError as error:
    print(f"refused: {error}", flush=True)
else:
    weight = module.get_params()[0]["line_weight"].asnumpy()
    print(f"trained to within {abs(weight - TRUE).max():.4f}", flush=True)
