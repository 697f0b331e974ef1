"""GoogLeNet (Szegedy et al., "Going deeper with convolutions", CVPR 2015, table 1), in gluon.

Without the classifiers that the paper adds to intermediate layers while it trains, and without
local response normalisation, which has no parameters. 6,998,552 parameters, as the model that
Caffe publishes (`bvlc_googlenet`) has for inference.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import nn

from experiments.models.modules import Branches, biased, chain

_INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Channels of 1x1, of the reduction before 3x3, 3x3, before 5x5, 5x5, and behind the pooling."""
_POOLED_BEHIND = ("3b", "4e")


def googlenet() -> mx.gluon.HybridBlock:
    """Logits of 1,000 classes for images of 224 x 224."""
    blocks = [
        biased(64, 7, strides=2),
        nn.MaxPool2D(3, 2, ceil_mode=True),
        biased(64, 1),
        biased(192, 3),
        nn.MaxPool2D(3, 2, ceil_mode=True),
    ]
    for name, channels in _INCEPTIONS.items():
        blocks.append(_inception(*channels))
        if name in _POOLED_BEHIND:
            blocks.append(nn.MaxPool2D(3, 2, ceil_mode=True))
    return chain(*blocks, nn.GlobalAvgPool2D(), nn.Dropout(0.4), nn.Dense(1000))


def _inception(
    one: int, three_reduced: int, three: int, five_reduced: int, five: int, pooled: int
) -> mx.gluon.HybridBlock:
    return Branches(
        biased(one, 1),
        chain(biased(three_reduced, 1), biased(three, 3)),
        chain(biased(five_reduced, 1), biased(five, 5)),
        chain(nn.MaxPool2D(3, 1, 1), biased(pooled, 1)),
    )
