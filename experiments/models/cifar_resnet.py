"""ResNet for CIFAR-10 (He et al., arXiv:1512.03385, section 4.2), in gluon.

Shortcuts have no parameters (option A). The one of 110 layers has 1,727,962 trained parameters;
the paper's table 6 says 1.7 million, and table 1.1 of the thesis 1.73 million for its ResNet.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.gluon import nn

from experiments.models.modules import chain, normalised

_CHANNELS = (16, 32, 64)


def cifar_resnet(layers: int) -> mx.gluon.HybridBlock:
    """Logits of 10 classes for images of 32 x 32; `layers` is 6n + 2."""
    blocks = [normalised(_CHANNELS[0], 3)]
    for channels in _CHANNELS:
        for place in range((layers - 2) // 6):
            blocks.append(_Residual(channels, halves=place == 0 and channels != _CHANNELS[0]))
    return chain(*blocks, nn.GlobalAvgPool2D(), nn.Dense(10))


class _Residual(mx.gluon.HybridBlock):
    """Two convolutions beside a shortcut; `halves`: the sides, with twice as many channels."""

    def __init__(self, channels: int, halves: bool) -> None:
        super().__init__(prefix="")
        self._halves = halves
        self.body = chain(
            normalised(channels, 3, strides=2 if halves else 1),
            nn.Conv2D(channels, 3, 1, 1, use_bias=False),
            nn.BatchNorm(),
        )

    def hybrid_forward(self, F: Any, data: Any) -> Any:
        shortcut = data
        if self._halves:
            # Every second pixel; zeros are the channels that the input lacks.
            shortcut = F.Pooling(data, kernel=(1, 1), stride=(2, 2), pool_type="max")
            shortcut = F.concat(shortcut, F.zeros_like(shortcut), dim=1)
        return F.relu(self.body(data) + shortcut)
