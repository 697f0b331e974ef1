"""The outer optimizer of workers that train by themselves: it needs no framework."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Dict, List, Optional, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.optimizer import OPTIMIZERS, OUTER, MakeOptimizer, Optimizer, State
from p3kv.wire.messages import DeclaredKey, Message, decode

_VELOCITY, _MASTER = "velocity", "master"
"""In `State.elements`: the momentum, and the value of a key of half precision in single."""


class OuterSettings(Message, frozen=True):
    """What servers are told of the outer optimizer."""

    rate: float
    momentum: float
    workers: int
    """How many workers' differences a sum is divided by."""

    def __post_init__(self) -> None:
        right = 0 < self.rate < math.inf and 0 <= self.momentum < 1 and self.workers >= 1
        if not right:
            raise ProtocolError(f"an outer optimizer can't have {self}")


class OuterOptimizer(Optimizer):
    """SGD with Nesterov's momentum: velocity = momentum * velocity + mean; value -= rate * (mean +
    momentum * velocity). `mean` is by how much the weights of the workers that have not left differ
    from the value in the mean. A key of half precision has its value in single precision here, too,
    from which it is rounded.
    """

    def __init__(self) -> None:
        self._from_steps: List[int] = []
        self._settings: List[OuterSettings] = []
        self._states: Dict[Tuple[int, int], Dict[str, np.ndarray]] = {}
        """Arrays by their names, by key and slice."""

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        if self._from_steps and from_step < self._from_steps[-1]:
            raise ProtocolError(f"optimizer settings for the past step {from_step}")
        self._settings.append(decode(settings, OuterSettings))
        self._from_steps.append(from_step)
        unneeded = max(0, bisect_right(self._from_steps, oldest_step) - 1)
        del self._from_steps[:unneeded], self._settings[:unneeded]

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        place = len(self._from_steps) if step is None else bisect_right(self._from_steps, step)
        if place == 0:
            raise ProtocolError(f"no optimizer settings hold for key {key.key!r} in step {step}")
        settings = self._settings[place - 1]
        state = self._states.setdefault((key.key_id, index), {})
        value = weight
        if total.dtype != weight.dtype:
            if _MASTER not in state:
                state[_MASTER] = weight.astype(total.dtype)
            value = state[_MASTER]
        if settings.workers > 1 and self.weight is not None:  # else differences add up
            total /= self.weight
        if settings.momentum:
            if _VELOCITY not in state:
                state[_VELOCITY] = np.zeros_like(total)
            velocity = state[_VELOCITY]
            velocity *= settings.momentum
            velocity += total
            total += settings.momentum * velocity
        total *= settings.rate
        value -= total
        if value is not weight:
            with np.errstate(over="ignore"):
                weight[:] = value.astype(weight.dtype)

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        state = self._states.pop((key.key_id, index), None)
        return State(state, {}) if state else None

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        if not state.elements.keys() <= {_VELOCITY, _MASTER} or state.numbers:
            raise ProtocolError("it sent a state that no outer optimizer can have")
        self._states[key.key_id, index] = {
            name: array.copy() for name, array in state.elements.items()
        }


class MakeOuter(MakeOptimizer):
    """Makes the outer optimizer."""

    def __call__(self) -> Optimizer:
        return OuterOptimizer()

    def get_ready(self) -> None:
        """There is nothing to import."""


OPTIMIZERS.register(OUTER, MakeOuter)
