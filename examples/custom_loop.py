"""A loop of one's own between the sum of the gradients and the update, on the workers.

    p3kv launch -n 2 -- python examples/custom_loop.py

With `update_on_kvstore=False` servers only sum. `allreduce_grads` starts this, the script then
sees the gradients of all workers together, and `update` runs the optimizer on each worker.
"""

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, STEPS = 32, 100
MOST_NORM = 1.0
WARM_UP = 20

store = mx.kv.create("p3")
whole_batch = BATCH * store.num_workers

mx.random.seed(1)  # all begin with the same weights
truth = mx.nd.random.normal(shape=(10, 1))
net = nn.HybridSequential()
net.add(nn.Dense(32, activation="tanh", in_units=10), nn.Dense(1, in_units=32))
net.initialize(mx.init.Xavier())
net.hybridize()
trainer = gluon.Trainer(
    net.collect_params(),
    "sgd",
    {"learning_rate": 0.0, "momentum": 0.9},
    kvstore=store,
    update_on_kvstore=False,
)
loss_of = gluon.loss.L2Loss()

mx.random.seed(100 + store.rank)  # from here on each worker draws other samples
for step in range(1, STEPS + 1):
    x = mx.nd.random.normal(shape=(BATCH, 10))
    y = mx.nd.dot(x, truth)
    with autograd.record():
        loss = loss_of(net(x), y)
    loss.backward()

    trainer.allreduce_grads()
    # Each gradient is now the sum over all workers, still to be divided by the whole batch. The
    # norm is a number in Python, so this line waits for all of them.
    gradients = [parameter.grad() for parameter in net.collect_params().values()]
    norm = gluon.utils.clip_global_norm(gradients, MOST_NORM * whole_batch) / whole_batch
    trainer.set_learning_rate(0.05 * min(1.0, step / WARM_UP))
    trainer.update(whole_batch)

    if step % 20 == 0:
        print(f"step {step}: loss {loss.mean().asscalar():.3f}, norm of the gradient {norm:.2f}")
