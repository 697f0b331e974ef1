"""A training script that does not import p3kv: it only names the store."""

import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.Dense(3, in_units=2)
net.initialize(mx.init.One())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="p3")
x = mx.nd.ones((1, 2))
for _ in range(2):
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    trainer.step(1)
# Each worker's gradient is 1 in every element.
print("weights", net.weight.data().asnumpy().ravel().tolist())
