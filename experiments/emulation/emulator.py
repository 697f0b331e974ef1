"""A model in training whose computation is emulated and whose arrays and store are real.

Each layer's forward and backward pass is an operation in MXNet's engine that reads the layer's
weights, takes the stated time and, going backward, writes its gradients. A store sees what it
sees under gluon: the same arrays, keys, calls and priorities, and gradients that become ready
one after the other while earlier layers still compute.
"""

from __future__ import annotations

import itertools
import statistics
from random import Random
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from experiments.emulation.stream import Span, Stream
from p3kv.frontends.mxnet import engine
from p3kv.report.forecast import Model

_ITERATIONS_AHEAD = 2


class EmulatedModel:
    """One worker's copy of a model: real weights and gradients, emulated computation.

    `dilation` multiplies every compute time. `gradient` fills the gradients once: they are
    constant, so an iteration costs the emulation nothing for them. It is zero by default, because
    a store that returns sums in the gradients would multiply anything else in each iteration; and
    negative, because p3kv leaves rows out whose bits are all zero.
    `noise` is the standard deviation of what is added to it, normally distributed, and drawn once
    by each worker for itself: a codec that picks elements finds some that are larger than others.

    `update_on_kvstore` and `apart` say how gradients are exchanged: as gluon's Trainer of MXNet
    1.9.1 does (`pushpull`), or as the paper's baseline does, push and pull apart. Without
    `update_on_kvstore` the sum comes back in the gradient and an operation that reads it and
    writes the weight stands for the optimizer, at no cost. With `in_turn`, gradients travel when
    the backward pass is complete, and the next forward pass begins when all weights are there.

    `straggling` is the share of iterations that take twice as long; which, the worker's rank says.

    Use it from one thread; `close` when done.
    """

    def __init__(
        self,
        model: Model,
        dilation: float = 1.0,
        gradient: float = -0.0,
        noise: float = 0.0,
        update_on_kvstore: bool = True,
        apart: bool = False,
        in_turn: bool = False,
        straggling: float = 0.0,
        stall_s: float = 60.0,
    ) -> None:
        self.model = model
        self._straggling = straggling
        self._factors = factors(0, straggling)
        self._factor = 1.0
        self.dilation = dilation
        self.weights: Dict[int, NDArray] = {}
        self.gradients: Dict[int, NDArray] = {}
        # What a script reads as the loss: ready when the forward pass is complete.
        self.loss = mx.nd.zeros((1,))
        self._update_on_kvstore = update_on_kvstore
        self._apart = apart
        self._in_turn = in_turn
        self._stall_s = stall_s
        keys = model.keys
        self._layer_keys = [
            [keys[parameter.name] for parameter in layer.parameters] for layer in model.layers
        ]
        for key in range(len(model.parameters)):
            self.weights[key] = self._new_weight(key)
        for key in sorted(key for layer in self._layer_keys for key in layer):
            self.gradients[key] = self._new_gradient(key, gradient)
            if noise:
                self.gradients[key] += _normal(self.weights[key].shape, noise)
        mx.nd.waitall()
        self._stream = Stream()
        self._last_of: List[int] = []

    @property
    def spans(self) -> Sequence[Span]:
        """What the emulated accelerator has done so far, in order."""
        return self._stream.spans

    @property
    def compute_s(self) -> float:
        """C: one iteration's computation, dilated."""
        return self.model.compute_s * self.dilation

    def broadcast(self, kv: Any) -> None:
        """Gives every array its first value, trained or not, as the Trainer does."""
        self._factors = factors(kv.rank, self._straggling)
        for key in self.weights:
            self._broadcast_key(kv, key)
        mx.nd.waitall()

    def forward(self) -> None:
        """Pushes the forward pass of one iteration and returns at once."""
        last = len(self._layer_keys) - 1
        with mx.autograd.record():  # as a script does: stores may hear of it
            for index, seconds in enumerate(self.model.forward_s):
                reads = [self.weights[key] for key in self._layer_keys[index]]
                self._submit(index, "forward", seconds, reads, [self.loss] if index == last else [])

    def backward(self) -> None:
        """Pushes the backward pass of one iteration and returns at once."""
        for index, seconds in reversed(list(enumerate(self.model.backward_s))):
            keys = self._layer_keys[index]
            reads = [self.weights[key] for key in keys]
            last = self._submit(
                index, "backward", seconds, reads, [self.gradients[key] for key in keys]
            )
        self._last_of.append(last)

    def exchange(self, kv: Any) -> None:
        """Gives all gradients to the store, in the order of the keys, and returns at once."""
        for key in self.gradients:
            self._exchange_key(kv, key)
        if not self._update_on_kvstore:
            for key, gradient in self.gradients.items():
                engine.push(engine.Operation.complete, [gradient], [self.weights[key]], b"update")

    def iteration(self, kv: Any) -> None:
        """Pushes one iteration, and waits only until the one before the last is complete.

        The wait is what keeps a script from running ahead of its accelerator without end; there
        is no barrier inside an iteration but with `in_turn`.
        """
        if len(self._last_of) >= _ITERATIONS_AHEAD:
            self._stream.wait(self._last_of[-_ITERATIONS_AHEAD], self._stall_s)
        self._factor = next(self._factors)
        self.forward()
        self.backward()
        if self._in_turn:
            self.wait()
        self.exchange(kv)
        if self._in_turn:
            mx.nd.waitall()

    def run(self, kv: Any, iterations: int) -> List[float]:
        """Runs `iterations` more, waits for their computation, and returns all times so far."""
        for _ in range(iterations):
            self.iteration(kv)
        self.wait()
        return self.iteration_s

    def wait(self) -> None:
        """Waits until all computation that was pushed is complete.

        Raises `TimeoutError` when a layer has waited too long for its weights.
        """
        if self._last_of:
            self._stream.wait(self._last_of[-1], self._stall_s)

    @property
    def iteration_s(self) -> List[float]:
        """The time of each complete iteration: from one end of the backward pass to the next.

        The first begins with the first forward operation.
        """
        spans = self.spans
        ends = [
            spans[n - 1].end_ns + spans[n - 1].late_ns for n in self._last_of if n <= len(spans)
        ]
        begins = [spans[0].start_ns, *ends] if spans else []
        return [(end - begin) / 1e9 for begin, end in zip(begins, ends)]

    def efficiency(self, warm_up: int = 2) -> float:
        """C by the median iteration after `warm_up` iterations; 1.0 when nothing is waited for."""
        return self.compute_s / statistics.median(self.iteration_s[warm_up:])

    def close(self) -> None:
        """Ends the emulation; may be called twice. Pushed operations end without their delays."""
        self._stream.close()

    # What an array is, for models in which some are no plain arrays.

    def _new_weight(self, key: int) -> NDArray:
        return mx.nd.zeros(self.model.parameters[key].shape)

    def _new_gradient(self, key: int, gradient: float) -> NDArray:
        # MXNet's `full` knows no negative zero.
        return mx.nd.array(np.full(self.weights[key].shape, gradient, np.float32))

    def _broadcast_key(self, kv: Any, key: int) -> None:
        kv.broadcast(key, self.weights[key], [self.weights[key]])

    def _exchange_key(self, kv: Any, key: int) -> None:
        gradient = self.gradients[key]
        out = self.weights[key] if self._update_on_kvstore else gradient
        if self._apart:
            kv.push(key, gradient, priority=-key)
            kv.pull(key, out=out, priority=-key)
        elif self._update_on_kvstore:
            kv.pushpull(key, [gradient], out=[out], priority=-key)
        else:
            kv.pushpull(key, [gradient], priority=-key)

    def _submit(
        self,
        index: int,
        phase: str,
        seconds: float,
        reads: Sequence[NDArray],
        writes: Sequence[NDArray],
    ) -> int:
        return self._stream.submit(
            self.model.layers[index].name,
            phase,
            len(self._last_of),
            seconds * self.dilation * self._factor,
            reads,
            writes,
        )


def factors(rank: int, straggling: float, count: Optional[int] = None) -> Iterator[float]:
    """How many times as long as usual each of a worker's iterations takes, so many or without end:
    twice for a share of them, drawn at random, the same in each run."""
    random = Random(rank)
    for _ in itertools.count() if count is None else range(count):
        yield 2.0 if random.random() < straggling else 1.0


def _normal(shape: Tuple[int, ...], deviation: float) -> NDArray:
    """Each process draws others."""
    drawn = np.random.default_rng().standard_normal(shape, dtype=np.float32)
    return mx.nd.array(np.multiply(drawn, deviation, out=drawn))


class NullStore:
    """A store that does nothing: with it, an iteration takes its computation's time."""

    type = "null"
    rank = 0
    num_workers = 1

    def broadcast(self, key: int, value: NDArray, out: Any, priority: int = 0) -> None:
        pass

    def push(self, key: int, value: Any, priority: int = 0) -> None:
        pass

    def pull(self, key: int, out: Any = None, priority: int = 0) -> None:
        pass

    def pushpull(self, key: int, value: Any, out: Any = None, priority: int = 0) -> None:
        pass
