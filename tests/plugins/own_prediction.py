"""A consistency rule that predicts weights, and an optimizer with a rule for that (SpecTrain).

The optimizer is momentum SGD. A weight moves on by its momentum while its gradients are under way.
"""

from typing import Any, Dict, Tuple

import numpy as np

from p3kv.consistency import CONSISTENCIES, BulkSynchronous
from p3kv.server.optimizer import Optimizer, State

RATE, MOMENTUM = 0.5, 0.75


class PredictsTwo(BulkSynchronous):
    predicts = 2


class Momentum(Optimizer):
    def __init__(self) -> None:
        self._momentum: Dict[Tuple[int, int], np.ndarray] = {}

    def update(
        self, key: Any, index: int, weight: np.ndarray, total: np.ndarray, step: Any
    ) -> None:
        of_slice = (key.key_id, index)
        momentum = MOMENTUM * self._momentum.get(of_slice, np.zeros_like(weight)) - RATE * total
        self._momentum[of_slice] = momentum
        weight += momentum

    def predicted(
        self, key: Any, index: int, weight: np.ndarray, steps: int, damped: bool
    ) -> np.ndarray:
        return weight + steps * self._momentum[key.key_id, index]

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("there is nothing to configure")

    def export(self, key: Any, index: int) -> State:
        return State({"momentum": self._momentum.pop((key.key_id, index))}, {})

    def load(self, key: Any, index: int, state: State) -> None:
        self._momentum[key.key_id, index] = state.elements["momentum"].copy()


CONSISTENCIES.register("predicts_two", PredictsTwo)
