"""The SNN of C.-C. Chen, C.-L. Yang and H.-Y. Cheng, "Efficient and Robust Parallel DNN Training
through Model Parallelism on Multi-GPU Platform", section 4.1, in gluon.

32 fully connected layers of 2,048 units, which normalise themselves (SELU), for CIFAR-10. The paper
does not say whether the classifier is one of the 32; here it is a layer more.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import nn

from experiments.models.modules import chain

_HIDDEN_LAYERS, _UNITS, _CLASSES = 32, 2048, 10


def snn() -> mx.gluon.HybridBlock:
    """Logits of 10 classes for images of 32 x 32."""
    hidden = [chain(nn.Dense(_UNITS), nn.SELU()) for _ in range(_HIDDEN_LAYERS)]
    return chain(*hidden, nn.Dense(_CLASSES))
