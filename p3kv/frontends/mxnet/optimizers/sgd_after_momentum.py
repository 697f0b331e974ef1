"""SGD for gradients whose momentum a codec has applied on the workers."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray


class SGDAfterMomentum(mx.optimizer.SGD):
    """SGD with momentum for gradients that bring theirs along: only weight decay gets it here.

    In MXNet's SGD, mom = momentum * mom - lr * (gradient + wd * weight) is added to the weight. The
    gradient's part of it is already in what arrives.
    """

    def _update_impl(
        self,
        indices: Any,
        weights: Any,
        grads: Any,
        states: Any,
        multi_precision: bool = False,
    ) -> None:
        if not isinstance(indices, (list, tuple)):
            indices, weights, grads, states = [indices], [weights], [grads], [states]
        self._update_count(indices)
        rates, decays = self._get_lrs(indices), self._get_wds(indices)
        for weight, gradient, state, rate, decay in zip(weights, grads, states, rates, decays):
            if multi_precision:
                mom, master = state
                self._update_one(master, gradient.astype(master.dtype), mom, rate, decay)
                master.copyto(weight)
            else:
                self._update_one(weight, gradient, state, rate, decay)

    def _update_one(
        self, weight: NDArray, gradient: NDArray, mom: NDArray, rate: float, decay: float
    ) -> None:
        if decay:
            mom *= self.momentum
            mom -= rate * decay * weight
        mx.nd.sgd_update(
            weight, gradient, out=weight, lr=rate, wd=0.0, rescale_grad=self.rescale_grad
        )
        if decay:
            weight += mom


def after_momentum(optimizer: mx.optimizer.SGD) -> SGDAfterMomentum:
    """The same optimizer, also when the script changes it, for such gradients."""
    after: SGDAfterMomentum = object.__new__(SGDAfterMomentum)
    after.__dict__ = optimizer.__dict__
    return after


def momentum_of(optimizer: mx.optimizer.Optimizer) -> Optional[float]:
    """The momentum of MXNet's SGD, if it has one and does not clip; else None."""
    if type(optimizer) not in _SGDS or not optimizer.momentum or optimizer.clip_gradient:
        return None
    return float(optimizer.momentum)


_SGDS: Sequence[type] = (mx.optimizer.SGD, mx.optimizer.ccSGD)
