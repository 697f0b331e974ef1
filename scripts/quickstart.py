"""Trains a small residual network on handwritten digits with P3.

Start it with `scripts/quickstart`, or with any number of workers that divides the batch:

    p3kv launch -n 2 -s 2 -- python scripts/quickstart.py

Each worker takes its part of every batch. At the end, worker 0 repeats the training alone on the
whole batches, without a store, and compares: P3 sends gradients in another order, but the model is
the one that synchronous SGD gives. It ends with an error if the model is worse than it should be.
"""

from __future__ import annotations

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import os
import sys
import time
from pathlib import Path
from typing import Dict, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

EPOCHS = 15
BATCH = 64
SEED = 2
GOOD_ACCURACY = 0.97
OPTIMIZER = ("sgd", {"learning_rate": 0.03, "momentum": 0.9, "wd": 1e-4})
PICTURE = Path(__file__).resolve().parent.parent / "quickstart.png"

Weights = Dict[str, np.ndarray]


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) in 0..1 as float32, and which digit each shows."""

    images: np.ndarray
    labels: np.ndarray


class Training(NamedTuple):
    """What a training leaves: the weights, the loss of each step, and the seconds it took."""

    weights: Weights
    losses: list[float]
    took_s: float


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


def read_digits() -> tuple[Digits, Digits]:
    """The 1,797 digits that come with scikit-learn: 1,437 to train with and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=SEED
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


def batches(digits: Digits, epoch: int) -> Iterator[np.ndarray]:
    """The numbers of the images in each whole batch of an epoch, the same in every process."""
    order = np.random.RandomState([SEED, epoch]).permutation(len(digits.labels))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        yield order[start : start + BATCH]


def train(
    net: nn.HybridSequential,
    digits: Digits,
    store: mx.kv.KVStoreBase | None,
    rank: int,
    num_workers: int,
    note: str,
) -> Training:
    """Trains on this worker's part of every batch; with `store` None, on the whole batches.

    The losses are those of part `rank` either way, so that the two trainings can be compared.
    """
    trainer = gluon.Trainer(net.collect_params(), *OPTIMIZER, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    mine = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    taken = mine if store is not None else slice(None)
    shown = mine if store is None else slice(None)
    steps = EPOCHS * (len(digits.labels) // BATCH)
    losses: list[float] = []
    start_s = time.perf_counter()
    with tqdm(total=steps, desc=note, disable=rank != 0) as bar:
        for epoch in range(EPOCHS):
            epoch_losses = []
            for batch in batches(digits, epoch):
                part = batch[taken]
                x, y = mx.nd.array(digits.images[part]), mx.nd.array(digits.labels[part])
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
    return Training(get_weights(net), losses, time.perf_counter() - start_s)


def get_weights(net: nn.HybridSequential) -> Weights:
    return {
        name: parameter.data().asnumpy()
        for name, parameter in net._collect_params_with_prefix().items()
    }


def set_weights(net: nn.HybridSequential, weights: Weights) -> None:
    for name, parameter in net._collect_params_with_prefix().items():
        parameter.set_data(mx.nd.array(weights[name]))


def accuracy(net: nn.HybridSequential, digits: Digits) -> float:
    guesses = net(mx.nd.array(digits.images)).asnumpy().argmax(axis=1)
    return float((guesses == digits.labels).mean())


def draw(with_p3: Training, alone: Training, num_workers: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(alone.losses, color="tab:orange", linewidth=4, alpha=0.6, label="one process")
    axes.plot(with_p3.losses, color="tab:blue", linewidth=1, label=f"P3, {num_workers} workers")
    axes.set(
        xlabel="step",
        ylabel="loss on worker 0's part of the batch",
        yscale="log",
        title="The same training with P3 and in one process",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=120)


def main() -> int:
    store = mx.kv.create("p3")
    if BATCH % store.num_workers:
        sys.exit(f"a batch of {BATCH} cannot be split evenly among {store.num_workers} workers")
    train_digits, test_digits = read_digits()
    # The same in every worker: the trainer hands rank 0's weights out in its first step, which is
    # after the first gradients were made.
    mx.random.seed(SEED)
    net = build_network()
    initial = get_weights(net)

    with_p3 = train(net, train_digits, store, store.rank, store.num_workers, "p3")
    if store.rank != 0:
        return 0
    stats = store.stats()
    reached = accuracy(net, test_digits)

    reference = build_network()
    set_weights(reference, initial)
    alone = train(reference, train_digits, None, 0, store.num_workers, "one process")
    difference = max(
        float(np.abs(with_p3.weights[name] - alone.weights[name]).max()) for name in alone.weights
    )
    draw(with_p3, alone, store.num_workers)

    images = len(with_p3.losses) * BATCH
    print(
        f"""
store            {store.type}, {store.num_workers} workers
test accuracy    {reached:.2%} of {len(test_digits.labels)} digits; one process: \
{accuracy(reference, test_digits):.2%}
throughput       {images / with_p3.took_s:,.0f} images/s; one process: \
{images / alone.took_s:,.0f} images/s
worker 0 sent    {stats["bytes_sent"]:,} bytes in {stats["slices_sent"]:,} slices
worker 0 got     {stats["bytes_received"]:,} bytes in {stats["slices_received"]:,} slices
weights          differ by {difference:.2e} at most from those of one process
loss curves      {PICTURE.name}

All processes share the {len(os.sched_getaffinity(0))} cores of this machine, and no network lies \
between them, so P3 has
nothing to gain here: more workers are no faster than one process. Where it helps, with four hosts
as network namespaces and limited links, beside MXNet's own stores (as root, some three minutes):

    {sys.executable} -m experiments.figure7 --quick --models resnet50 --output output
"""
    )
    if reached < GOOD_ACCURACY:
        print(f"the accuracy is below {GOOD_ACCURACY:.0%}: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
