"""A network with all that a Trainer must respect, and its training without any store."""

from typing import Callable, Dict, List

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS = 6
BATCH = 8
RATES = [0.2, 0.2, 0.05, 0.05, 0.4, 0.1]
SGD = {"learning_rate": RATES[0], "momentum": 0.9, "wd": 1e-2}
MAX_NORM = 0.5
Weights = Dict[str, np.ndarray]


def build(devices: List[mx.Context]) -> nn.HybridSequential:
    """Deferred shapes, a frozen layer and multipliers; oneDNN likes its channels in sixteens."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.Conv2D(16, 3, padding=1, activation="tanh"),
            nn.Conv2D(32, 3, padding=1, activation="tanh"),
            nn.Dense(20, activation="tanh"),
            nn.Dense(20, activation="tanh"),
            nn.Dense(3),
        )
    net[3].collect_params().setattr("grad_req", "null")
    net[1].weight.lr_mult = 0.25
    net[2].weight.wd_mult = 3.0
    net[4].bias.wd_mult = 0.0
    net.initialize(mx.init.Xavier(magnitude=3), ctx=devices)
    net.hybridize()
    return net


def part(step: int, rank: int) -> tuple:
    """A worker's part of a step's batch."""
    generator = np.random.RandomState([step, rank])
    x = generator.standard_normal((BATCH, 16, 6, 6)).astype(np.float32)
    y = generator.standard_normal((BATCH, 3)).astype(np.float32)
    return x, y


def late(x: np.ndarray) -> mx.nd.NDArray:
    """The same numbers, but not before Python has pushed the whole step into the engine."""
    work = mx.nd.ones((1500, 1500))
    return mx.nd.array(x) + 0 * mx.nd.dot(work, work)[0, 0]


def backward(net: gluon.Block, x: mx.nd.NDArray, y: np.ndarray, devices: List[mx.Context]) -> None:
    """Leaves the gradients of the summed loss, of an equal share of the rows on each device."""
    losses = []
    with autograd.record():
        for xs, ys in zip(
            gluon.utils.split_and_load(x, devices),
            gluon.utils.split_and_load(mx.nd.array(y), devices),
        ):
            losses.append(gluon.loss.L2Loss()(net(xs), ys).sum())
    autograd.backward(losses)


def infer(net: gluon.Block, step: int) -> np.ndarray:
    """A forward pass without training, after which oneDNN keeps weights in a layout of its own."""
    return net(mx.nd.array(part(step, 99)[0])).asnumpy()


def weights(net: gluon.Block) -> Weights:
    """All weights by their place in the network."""
    return {n: p.data().asnumpy() for n, p in net._collect_params_with_prefix().items()}


def initial(seed: int) -> Weights:
    """The weights that a network has after its first forward pass with this seed."""
    net = build([mx.cpu()])
    mx.random.seed(seed)
    net(mx.nd.array(part(0, 0)[0]))
    return weights(net)


def clip(gradients: List[mx.nd.NDArray]) -> float:
    """Scales gradients in place; returns their global norm before it."""
    return gluon.utils.clip_global_norm(gradients, MAX_NORM)


class Alone:
    """One process that does the work of all workers one after the other, and sums in numpy."""

    def __init__(self, num_workers: int, devices: List[mx.Context]) -> None:
        self._devices = devices
        self._begin = [initial(seed) for seed in range(num_workers)]
        # Rank 0's weights hold, but not before the first step: each worker's first gradients are
        # those of the weights that it began with, as with MXNet's own distributed stores.
        self.net = build([mx.cpu()])
        self.net(mx.nd.array(part(0, 0)[0]))
        places = self.net._collect_params_with_prefix()
        self._parameters = {n: p for n, p in places.items() if p.grad_req != "null"}
        self._optimizer = mx.optimizer.create(
            "sgd", param_idx2name={n: n for n in places}, rescale_grad=1 / BATCH, **SGD
        )
        self._optimizer.set_lr_mult({n: p.lr_mult for n, p in places.items()})
        self._optimizer.set_wd_mult({n: p.wd_mult for n, p in places.items()})
        self._updater = mx.optimizer.get_updater(self._optimizer)

    def step(self, step: int, change: Callable[[List[mx.nd.NDArray]], object]) -> None:
        """One update with the sum of all gradients, after `change` has had them."""
        totals: List[np.ndarray] = []
        for rank, begin in enumerate(self._begin):
            if step == 0:
                self._set(begin)
            of_rank = self._gradients(*part(step, rank))
            totals = of_rank if not rank else [t + g for t, g in zip(totals, of_rank)]
        if step == 0:
            self._set(self._begin[0])
        summed = [mx.nd.array(total) for total in totals]
        change(summed)
        self._optimizer.set_learning_rate(RATES[step])
        for (name, parameter), gradient in zip(self._parameters.items(), summed):
            self._updater(name, gradient, parameter.data())

    def _gradients(self, x: np.ndarray, y: np.ndarray) -> List[np.ndarray]:
        totals: List[np.ndarray] = []
        rows = len(x) // len(self._devices)
        for device in range(len(self._devices)):
            share = slice(device * rows, (device + 1) * rows)
            backward(self.net, mx.nd.array(x[share]), y[share], [mx.cpu()])
            one = [p.grad().asnumpy() for p in self._parameters.values()]
            totals = one if not device else [t + g for t, g in zip(totals, one)]
        return totals

    def _set(self, values: Weights) -> None:
        for name, parameter in self.net._collect_params_with_prefix().items():
            parameter.set_data(mx.nd.array(values[name]))
