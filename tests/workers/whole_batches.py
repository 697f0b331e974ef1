"""What docs/using.md tells scripts of several workers: data, metrics, gluon's Estimator."""

import json
import logging

import p3kv  # noqa: F401

# isort: split
import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator

SAMPLES, BATCH, STEPS = 23, 2, 5

kv = mx.kv.create("p3")
dataset = gluon.data.SimpleDataset([mx.nd.ones(1)] * SAMPLES)
most = len(dataset) // kv.num_workers
mine = gluon.data.SimpleDataset([dataset[i] for i in range(kv.rank, len(dataset), kv.num_workers)])
inputs = gluon.data.SimpleDataset([(x, mx.nd.zeros(1)) for x in mine.take(most)])
loader = gluon.data.DataLoader(inputs, BATCH, shuffle=True, last_batch="discard")

net = gluon.nn.Dense(1, in_units=1, use_bias=False)
net.initialize(mx.init.One())
loss = gluon.loss.L1Loss(weight=1 / kv.num_workers)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kv)
estimator = Estimator(net, loss=loss, trainer=trainer)
estimator.logger.setLevel(logging.WARNING)
estimator.fit(loader, epochs=1)

sums = mx.kv.create("p3")
sums.init("metric", mx.nd.zeros(2))
accuracies = []
for correct in (1, 3):
    counts = mx.nd.array([correct + kv.rank, 4])
    sums.pushpull("metric", counts, out=counts)
    of_all, seen = counts.asnumpy()
    accuracies.append(float(of_all / seen))
print(json.dumps([len(loader), float(net.weight.data().asscalar()), accuracies]))
