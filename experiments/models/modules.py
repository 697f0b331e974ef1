"""What the thesis's networks are built of, in gluon: convolutions, and branches side by side."""

from __future__ import annotations

from typing import Any, Sequence, Union

import mxnet as mx
from mxnet.gluon import nn

Side = Union[int, Sequence[int]]


class Branches(mx.gluon.HybridBlock):
    """Reads its input by several branches and joins what they write, by channels."""

    def __init__(self, *branches: mx.gluon.HybridBlock) -> None:
        super().__init__(prefix="")
        self._branches = branches
        for branch in branches:
            self.register_child(branch)

    def hybrid_forward(self, F: Any, data: Any) -> Any:
        return F.concat(*[branch(data) for branch in self._branches], dim=1)


def chain(*blocks: mx.gluon.HybridBlock) -> mx.gluon.HybridBlock:
    """One block after the other. Arrays are named by their own kind and place, not by the block."""
    made = nn.HybridSequential(prefix="")
    made.add(*blocks)
    return made


def biased(channels: int, kernel: Side, strides: int = 1) -> mx.gluon.HybridBlock:
    """A convolution with biases that keeps a side, or divides it by `strides`."""
    return nn.Conv2D(channels, kernel, strides, _same(kernel), activation="relu")


def normalised(
    channels: int, kernel: Side, strides: int = 1, valid: bool = False, scale: bool = True
) -> mx.gluon.HybridBlock:
    """A convolution and batch normalisation; `valid`: without padding.

    Without `scale`, the normalisation has an offset only.
    """
    padding = 0 if valid else _same(kernel)
    return chain(
        nn.Conv2D(channels, kernel, strides, padding, use_bias=False),
        nn.BatchNorm(scale=scale),
        nn.Activation("relu"),
    )


def _same(kernel: Side) -> Side:
    return kernel // 2 if isinstance(kernel, int) else [side // 2 for side in kernel]
