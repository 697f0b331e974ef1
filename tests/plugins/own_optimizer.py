"""A front end's optimizer of a user's own, in numpy: momentum, whose state servers re-slice."""

from typing import Dict, Optional, Tuple

import numpy as np

from p3kv.server.optimizer import OPTIMIZERS, MakeOptimizer, Optimizer, State
from p3kv.wire.messages import DeclaredKey


class Momentum(Optimizer):
    """weight -= rate * state, and state = state / 2 + gradient. Settings are the rate."""

    def __init__(self) -> None:
        self._rate = np.float32(0)
        self._states: Dict[Tuple[int, int], np.ndarray] = {}

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        self._rate = np.float32(settings.decode())

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        state = self._states.setdefault((key.key_id, index), np.zeros_like(weight))
        state *= np.float32(0.5)
        state += total
        weight -= self._rate * state

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        state = self._states.pop((key.key_id, index), None)
        return None if state is None else State({"momentum": state}, {})

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        self._states[key.key_id, index] = state.elements["momentum"].copy()


class MakeMomentum(MakeOptimizer):
    def __call__(self) -> Optimizer:
        return Momentum()

    def get_ready(self) -> None:
        """There is nothing to import."""


OPTIMIZERS.register("toy", MakeMomentum)
