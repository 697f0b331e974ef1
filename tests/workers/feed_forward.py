"""Trains a layer with auxiliary states by MXNet's FeedForward."""

import p3kv  # noqa: F401, I001
import mxnet as mx
import numpy as np

layer = mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm", fix_gamma=False)
symbol = mx.sym.LinearRegressionOutput(layer, mx.sym.Variable("label"), name="out")
model = mx.model.FeedForward(symbol, num_epoch=1, optimizer="sgd", learning_rate=0.1)
x = np.random.RandomState(1).normal(1, 2, (8, 3)).astype(np.float32)
data = mx.io.NDArrayIter(x, x, batch_size=4, label_name="label")
model.fit(data, kvstore="p3", eval_metric="mse")
print("it has trained")
