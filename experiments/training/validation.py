"""What a network has learned, by samples that nobody trains with."""

from __future__ import annotations

from typing import Any, Dict

import mxnet as mx
from mxnet import gluon

from experiments.training.data import Split

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
_VALIDATED_AT_ONCE = 100


def validate(network: Any, data: Split) -> Dict[str, float]:
    """The mean loss, in nats, and the share of guesses that are right."""
    loss, right = 0.0, 0
    for first in range(0, len(data.validation), _VALIDATED_AT_ONCE):
        x, y = (
            mx.nd.array(of[first:][:_VALIDATED_AT_ONCE])
            for of in (data.validation, data.validation_labels)
        )
        scores = network(x)
        loss += float(LOSS(scores, y).sum().asscalar())
        right += int((scores.argmax(axis=-1) == y).sum().asscalar())
    return {"loss": loss / len(data.validation), "accuracy": right / data.validation_labels.size}
