"""The models of gluon's zoo, by name."""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon.model_zoo import vision

from p3kv.frontends.mxnet.layers import trace
from p3kv.report.forecast import Model

_PIXELS = 224
_PIXELS_OF_INCEPTION = 299
"""Sides of the squares that the models' papers train with."""


def model(name: str, batch_size: int, compute_s: float) -> Model:
    """The model called `name`, for batches of `batch_size` images; no weight is allocated.

    `compute_s` is C, the time of a batch's forward and backward pass.
    """
    pixels = _PIXELS_OF_INCEPTION if name == "inceptionv3" else _PIXELS
    with mx.name.NameManager():  # the names, and so the keys, of a fresh script's first network
        block = vision.get_model(name)
    layers, parameters = trace(block, {"data": (batch_size, 3, pixels, pixels)})
    return Model(name, batch_size, compute_s, tuple(layers), tuple(parameters))
