"""The models by name: they are built by MXNet, which experiments of PyTorch alone need not have."""

from __future__ import annotations

import functools

from p3kv.report.forecast import Model

MODELS = ("resnet50", "inception_v3", "vgg19", "sockeye")
"""The models of the paper's evaluation."""
THESIS_MODELS = ("googlenet", "resnet110", "inception_v4")
"""The models of the thesis's evaluation."""


@functools.lru_cache(maxsize=None)
def load(name: str) -> Model:
    """Returns the model called `name`, such as one of `MODELS`."""
    from experiments.models.builders import build  # which imports MXNet

    return build(name)
