"""Image classification with gluon: what `kvstore='p3'` asks of a script.

p3kv launch -n 2 -- python examples/image_classification.py
"""

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

CLASSES, IMAGES, TEST_IMAGES = 10, 2000, 400
BATCH = 50  # of each worker
EPOCHS = 3


def draw_images():
    """Noisy pictures of ten patterns, the same on every worker: (n, 1, 16, 16) and labels."""
    random = np.random.RandomState(1)
    patterns = random.uniform(size=(CLASSES, 1, 16, 16))
    labels = random.randint(CLASSES, size=IMAGES + TEST_IMAGES)
    images = patterns[labels] + random.normal(0, 0.5, (len(labels), 1, 16, 16))
    return images.astype("float32"), labels.astype("float32")


def build_network():
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, 3, activation="relu"),
        nn.MaxPool2D(),
        nn.Conv2D(32, 3, activation="relu"),
        nn.Flatten(),
        nn.Dense(CLASSES),
    )
    net.initialize(mx.init.Xavier(), ctx=device)
    net.hybridize()
    return net


def accuracy_of(net, images, labels):
    metric = mx.metric.Accuracy()
    metric.update(mx.nd.array(labels), net(mx.nd.array(images, ctx=device)))
    return metric.get()[1]


# The store knows how many workers there are, and which of them this one is.
store = mx.kv.create("p3")
rank, num_workers = store.rank, store.num_workers
device = mx.gpu(store.local_rank) if mx.context.num_gpus() else mx.cpu()

# Each worker trains on its own images. All have as many, so all make as many steps.
images, labels = draw_images()
mine = slice(rank, IMAGES, num_workers)
dataset = gluon.data.ArrayDataset(images[mine], labels[mine])
loader = gluon.data.DataLoader(dataset, BATCH, shuffle=True, last_batch="discard")

# The same first weights everywhere. The Trainer hands out worker 0's in its first step, too, but
# the first gradients are older.
mx.random.seed(1)
net = build_network()
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.002}, kvstore=store)

for epoch in range(EPOCHS):
    losses = []
    for x, y in loader:
        x, y = x.as_in_context(device), y.as_in_context(device)
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        # The store sums the gradients of all workers: divide by all their images.
        trainer.step(BATCH * num_workers)
        # To read the loss here would wait for it, and hold up the next batch.
        losses.append(loss.mean())
    mean = float(mx.nd.stack(*losses).mean().asscalar())
    print(f"epoch {epoch + 1}: loss {mean:.3f}")

if rank == 0:  # all workers have the same weights
    reached = accuracy_of(net, images[IMAGES:], labels[IMAGES:])
    print(f"accuracy {reached:.2f} on {TEST_IMAGES} other images")
