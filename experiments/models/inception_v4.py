"""Inception-v4 (Szegedy et al., arXiv:1602.07261, figures 3 to 9), in gluon.

Batch normalisation has no scale, as in Google's own TensorFlow code for this network
(`tf.contrib.slim`), and there is no classifier beside the last. This gives the 42.65 million
parameters of the thesis's table 1.1. Implementations with a scale publish 42,679,816.
"""

from __future__ import annotations

from functools import partial
from typing import List

import mxnet as mx
from mxnet.gluon import nn

from experiments.models.modules import Branches, chain, normalised

_conv = partial(normalised, scale=False)
_UPRIGHT, _FLAT = (7, 1), (1, 7)


def inception_v4() -> mx.gluon.HybridBlock:
    """Logits of 1,000 classes for images of 299 x 299."""
    return chain(
        *_stem(),
        *[_inception_a() for _ in range(4)],
        _reduction_a(),
        *[_inception_b() for _ in range(7)],
        _reduction_b(),
        *[_inception_c() for _ in range(3)],
        nn.GlobalAvgPool2D(),
        nn.Dropout(0.2),
        nn.Dense(1000),
    )


def _stem() -> List[mx.gluon.HybridBlock]:
    return [
        _conv(32, 3, strides=2, valid=True),
        _conv(32, 3, valid=True),
        _conv(64, 3),
        Branches(nn.MaxPool2D(3, 2), _conv(96, 3, strides=2, valid=True)),
        Branches(
            chain(_conv(64, 1), _conv(96, 3, valid=True)),
            chain(_conv(64, 1), _conv(64, _UPRIGHT), _conv(64, _FLAT), _conv(96, 3, valid=True)),
        ),
        Branches(_conv(192, 3, strides=2, valid=True), nn.MaxPool2D(3, 2)),
    ]


def _inception_a() -> mx.gluon.HybridBlock:
    return Branches(
        chain(nn.AvgPool2D(3, 1, 1), _conv(96, 1)),
        _conv(96, 1),
        chain(_conv(64, 1), _conv(96, 3)),
        chain(_conv(64, 1), _conv(96, 3), _conv(96, 3)),
    )


def _reduction_a() -> mx.gluon.HybridBlock:
    return Branches(
        nn.MaxPool2D(3, 2),
        _conv(384, 3, strides=2, valid=True),
        chain(_conv(192, 1), _conv(224, 3), _conv(256, 3, strides=2, valid=True)),
    )


def _inception_b() -> mx.gluon.HybridBlock:
    return Branches(
        chain(nn.AvgPool2D(3, 1, 1), _conv(128, 1)),
        _conv(384, 1),
        chain(_conv(192, 1), _conv(224, _FLAT), _conv(256, _UPRIGHT)),
        chain(
            _conv(192, 1),
            _conv(192, _FLAT),
            _conv(224, _UPRIGHT),
            _conv(224, _FLAT),
            _conv(256, _UPRIGHT),
        ),
    )


def _reduction_b() -> mx.gluon.HybridBlock:
    return Branches(
        nn.MaxPool2D(3, 2),
        chain(_conv(192, 1), _conv(192, 3, strides=2, valid=True)),
        chain(
            _conv(256, 1),
            _conv(256, _FLAT),
            _conv(320, _UPRIGHT),
            _conv(320, 3, strides=2, valid=True),
        ),
    )


def _inception_c() -> mx.gluon.HybridBlock:
    def both() -> mx.gluon.HybridBlock:
        return Branches(_conv(256, (1, 3)), _conv(256, (3, 1)))

    return Branches(
        chain(nn.AvgPool2D(3, 1, 1), _conv(256, 1)),
        _conv(256, 1),
        chain(_conv(384, 1), both()),
        chain(_conv(384, 1), _conv(448, (1, 3)), _conv(512, (3, 1)), both()),
    )
