"""Trains a small residual network on handwritten digits with MXNet and P3.

Start it with `scripts/quickstart mxnet`, or with any number of workers that divides the batch:

    p3kv launch -n 2 -s 2 -- python -m scripts.quickstart_mxnet

Each worker takes its part of every batch. At the end, worker 0 repeats the training alone on the
whole batches, without a store, and compares: P3 sends gradients in another order, but the model is
the one that synchronous SGD gives. It ends with an error if the model is worse than it should be.
"""

from __future__ import annotations

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import sys
import time
from typing import Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from tqdm import tqdm

from scripts import digits
from scripts.digits import BATCH, EPOCHS, Digits, Training, Weights

OPTIMIZER = (
    "sgd",
    {"learning_rate": digits.RATE, "momentum": digits.MOMENTUM, "wd": digits.WEIGHT_DECAY},
)


class Residual(nn.HybridBlock):
    """Two convolutions around which the input also goes straight to the output.

    There is no batch normalisation: its statistics would depend on how a batch is split among the
    workers, and the comparison would not be one of the store.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        with self.name_scope():
            self.first = nn.Conv2D(channels, 3, padding=1, in_channels=channels)
            self.smooth = nn.GELU()
            # Zero at first: the block starts as its straight way and needs no normalisation.
            self.second = nn.Conv2D(
                channels, 3, padding=1, in_channels=channels, weight_initializer="zeros"
            )

    def hybrid_forward(self, F: object, x: mx.nd.NDArray) -> mx.nd.NDArray:
        return x + self.second(self.smooth(self.first(x)))


def build_network() -> nn.HybridSequential:
    """A network without kinks: rectifiers and maximum pooling would blow a difference in the last
    bit, which any other order of a sum makes, up to one in the third digit within an epoch."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(32, 3, padding=1, in_channels=1),
        nn.GELU(),
        Residual(32),
        nn.Conv2D(64, 3, in_channels=32),
        nn.GELU(),
        Residual(64),
        nn.AvgPool2D(2),
        nn.Flatten(),
        nn.Dense(10, in_units=64 * 3 * 3),
    )
    net.initialize(mx.init.Xavier(rnd_type="gaussian", magnitude=2))
    net.hybridize(static_alloc=True)
    return net


def train(
    net: nn.HybridSequential,
    train_digits: Digits,
    test_digits: Digits,
    store: Optional[mx.kv.KVStoreBase],
    part: slice,
    title: str,
) -> Training:
    """Trains on `part` of every batch; with `store` None, on the whole batches.

    The losses are those of `part` either way, so that the two trainings can be compared.
    """
    trainer = gluon.Trainer(net.collect_params(), *OPTIMIZER, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    taken, shown = (part, slice(None)) if store is not None else (slice(None), part)
    steps = EPOCHS * (len(train_digits.labels) // BATCH)
    losses: list[float] = []
    start_s = time.perf_counter()
    with tqdm(total=steps, desc=title, disable=part.start != 0) as bar:
        for epoch in range(EPOCHS):
            epoch_losses = []
            for batch in digits.batches(train_digits, epoch):
                taken_images = batch[taken]
                x = mx.nd.array(train_digits.images[taken_images])
                y = mx.nd.array(train_digits.labels[taken_images])
                with autograd.record():
                    loss = loss_of(net(x), y)
                loss.backward()
                trainer.step(BATCH)  # The batch of all workers: the store sums their gradients.
                # Not read yet: that would wait for the forward pass, while the next step could
                # already be on its way.
                epoch_losses.append(loss[shown].mean())
                bar.update()
            losses.extend(float(loss.asscalar()) for loss in epoch_losses)
            bar.set_postfix(loss=f"{np.mean(losses[-len(epoch_losses) :]):.4f}")
    mx.nd.waitall()
    took_s = time.perf_counter() - start_s
    guesses = net(mx.nd.array(test_digits.images)).asnumpy().argmax(axis=1)
    accuracy = float((guesses == test_digits.labels).mean())
    return Training(title, get_weights(net), losses, took_s, accuracy)


def get_weights(net: nn.HybridSequential) -> Weights:
    return {
        name: parameter.data().asnumpy()
        for name, parameter in net._collect_params_with_prefix().items()
    }


def set_weights(net: nn.HybridSequential, weights: Weights) -> None:
    for name, parameter in net._collect_params_with_prefix().items():
        parameter.set_data(mx.nd.array(weights[name]))


def main() -> int:
    store = mx.kv.create("p3")
    part = digits.part_of_batch(store.rank, store.num_workers)
    read = digits.read_digits()
    # The same in every worker: the trainer hands rank 0's weights out in its first step, which is
    # after the first gradients were made.
    mx.random.seed(digits.SEED)
    net = build_network()
    initial = get_weights(net)

    with_p3 = train(net, *read, store, part, f"P3, {store.num_workers} workers")
    if store.rank != 0:
        return 0
    stats = store.stats()

    reference = build_network()
    set_weights(reference, initial)
    alone = train(reference, *read, None, part, "one process")
    facts = f"""\
worker 0 sent                {stats["bytes_sent"]:,} bytes in {stats["slices_sent"]:,} slices
worker 0 received            {stats["bytes_received"]:,} bytes in \
{stats["slices_received"]:,} slices
"""
    figure = "experiments.figure7 --quick --models resnet50 --output output"
    return digits.report(with_p3, [alone], facts, f"{sys.executable} -m {figure}")


if __name__ == "__main__":
    sys.exit(main())
