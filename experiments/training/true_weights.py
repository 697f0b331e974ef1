"""The servers' weights beside those that a worker computes with, where a rule gives it others."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon


class TrueWeights:
    """Reads the weights of a network from its servers, and leaves the worker's own as they are.

    `parameters` are the network's, in the order in which its Trainer has them: their places are
    the store's keys. Pulling waits for all workers' gradients of the last step, so it changes when
    a worker computes, and with the rule `delayed` not what.
    """

    def __init__(self, store: Any, parameters: Sequence[gluon.Parameter]) -> None:
        self._store = store
        self._parameters = parameters
        self._keys = [key for key, one in enumerate(parameters) if one.grad_req != "null"]

    def own(self) -> np.ndarray:
        """All trained elements, as this worker has them."""
        return _joined([self._parameters[key].data() for key in self._keys])

    def pulled(self) -> np.ndarray:
        """All trained elements, as the servers have them, all pushes of this worker included."""
        return _joined(list(self._pull().values()))

    def copy_into(self, others: Sequence[gluon.Parameter]) -> None:
        """Gives a network of the same parameters the servers' weights, and this worker's running
        averages, which no server has."""
        true = self._pull()
        for key, (mine, other) in enumerate(zip(self._parameters, others)):
            other.set_data(true[key] if key in true else mine.data())

    def _pull(self) -> Dict[int, mx.nd.NDArray]:
        """By key."""
        arrays = {key: mx.nd.empty(self._parameters[key].shape) for key in self._keys}
        for key, array in arrays.items():
            self._store.pull(key, out=array)
        return arrays


class Errors:
    """How far weights are from the true ones in each step, as root-mean-square errors."""

    def __init__(self, staleness: int) -> None:
        self._known: Deque[np.ndarray] = deque(maxlen=staleness + 1)
        self.own: List[float] = []
        """Of the weights that this worker computes with."""
        self.stale: List[float] = []
        """Of the true weights `staleness` steps ago, in the same training."""

    def add(self, own: np.ndarray, true: np.ndarray) -> None:
        self._known.append(true)
        self.own.append(_rms(own - true))
        self.stale.append(_rms(self._known[0] - true))


def _joined(arrays: Sequence[mx.nd.NDArray]) -> np.ndarray:
    return np.concatenate([array.asnumpy().ravel() for array in arrays])


def _rms(apart: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(apart, dtype=np.float64))))
