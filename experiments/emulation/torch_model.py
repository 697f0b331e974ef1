"""A PyTorch model whose computation is emulated: its parameters, gradients and graph are real.

Each layer is a module. Its forward pass reads the layer's weights and takes the stated time, and so
does its backward pass, which then gives the gradients. So a store sees what it sees of any model:
hooks, and gradients that become ready one after the other while earlier layers still compute.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any, Iterator, List, Sequence, Tuple

import torch

from experiments.emulation.plain_layers import PlainLayer

_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>


class Accelerator:
    """Computes for a stated time, which takes no processor.

    A thread that wakes up late begins its next operation that much earlier, so lateness does not
    add up; what the thread itself does between operations does. For one thread.
    """

    def __init__(self) -> None:
        # The default lets the kernel add 0.05 ms to every sleep. It is per thread.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._late_ns = 0

    def compute(self, seconds: float, since_ns: int) -> None:
        """Ends `seconds` after `since_ns`, on the monotonic clock, less what it was late before."""
        end_ns = since_ns - self._late_ns + round(seconds * 1e9)
        left_ns = end_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        self._late_ns = max(0, time.monotonic_ns() - end_ns)

    def waited(self, waited_ns: int) -> None:
        """Takes note of a wait: the next operation could not begin before its end."""
        self._late_ns = max(0, self._late_ns - waited_ns)


class Layer(torch.nn.Module):
    """A layer of real parameters; its input and output is a number that ties layers together.

    Gradients are zero, as in `experiments.emulation.emulator`, and stay the same.
    """

    def __init__(self, layer: PlainLayer, accelerator: Accelerator) -> None:
        super().__init__()
        self.times = layer
        self.accelerator = accelerator
        for number, shape in enumerate(layer.shapes):
            self.register_parameter(str(number), torch.nn.Parameter(torch.zeros(*shape)))
        # Negative, because p3kv leaves rows out whose bits are all zero.
        self.gradients = [torch.full(shape, -0.0) for shape in layer.shapes]

    @property
    def size_bytes(self) -> int:
        return sum(4 * math.prod(shape) for shape in self.times.shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began_ns, worked_ns = time.monotonic_ns(), time.thread_time_ns()
        weights = list(self._parameters.values())
        for weight in weights:
            assert weight is not None
            weight.detach()  # any operation that reads the value
        now_ns = time.monotonic_ns()
        self.accelerator.waited(now_ns - began_ns - (time.thread_time_ns() - worked_ns))
        return _Passes.apply(x, self, now_ns, *weights)  # type: ignore[no-any-return]


class _Passes(torch.autograd.Function):
    """Both passes of a layer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: Layer, began_ns: int, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer = layer
        layer.accelerator.compute(layer.times.forward_s, began_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Any, ...]:
        layer: Layer = ctx.layer
        layer.accelerator.compute(layer.times.backward_s, time.monotonic_ns())
        # Tensors of their own over the same memory, which torch takes as gradients and copies none.
        return gradient, None, None, *(one.detach() for one in layer.gradients)


def units(layers: Sequence[Layer], least_bytes: int) -> Iterator[torch.nn.Sequential]:
    """Joins consecutive layers to modules of at least so many bytes, but the last."""
    unit: List[Layer] = []
    for layer in layers:
        unit.append(layer)
        if sum(one.size_bytes for one in unit) >= least_bytes:
            yield torch.nn.Sequential(*unit)
            unit = []
    if unit:
        yield torch.nn.Sequential(*unit)
