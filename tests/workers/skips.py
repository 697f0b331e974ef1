"""Two workers of which one does not push what the other pushes, as the argument says.

`skips`: worker 1 leaves a parameter out in the third step. `more`: worker 0 has a key more.
`unknown`: worker 1 has a key that worker 0 does not have.
"""

import p3kv  # noqa: F401, I001
import sys

import mxnet as mx
from mxnet import autograd, gluon

how = sys.argv[1]
store = mx.kv.create("p3")
odd = (how, store.rank) in (("more", 0), ("unknown", 1))
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    for _ in range(2):
        net.add(gluon.nn.Dense(4, in_units=4))
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
if odd:
    more = mx.nd.ones((4,))
    store.init("net_dense_more", more)
    if how == "more":
        store.pushpull("net_dense_more", more, out=more)
    else:
        store.pull("net_dense_more", out=more)
for step in range(1, 6):
    if (how, store.rank, step) == ("skips", 1, 3):
        # As a script does that freezes a layer on one worker only.
        net[0].weight.grad_req = "null"
    with autograd.record():
        loss = net(mx.nd.ones((1, 4))).sum()
    loss.backward()
    trainer.step(1)
    mx.nd.waitall()
    print(f"step {step}", flush=True)
