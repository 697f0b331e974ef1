"""The servers of workers that train by themselves, and what workers take from them, in NumPy."""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

import numpy as np

from p3kv.consistency import LocalTraining
from p3kv.store.turns import Turn


class Outer:
    """All workers' exchanges with the servers, step by step."""

    def __init__(
        self, rule: LocalTraining, turns: Sequence[Turn], values: Sequence[np.ndarray]
    ) -> None:
        """`turns` and `values` are those of the weights, in their order."""
        self.values = list(values)
        self._rule = rule
        self._turns = turns
        self._velocities = [np.zeros_like(one) for one in values]
        self._sent: Dict[int, Tuple[int, Dict[int, np.ndarray]]] = {}
        """By weight: when its value is taken, and the workers' weights when it was sent."""

    def exchange(
        self, step: int, at: int, weights: Dict[int, np.ndarray], trains: bool = True
    ) -> Dict[int, np.ndarray]:
        """What a weight is on each worker after a step, in which these have been learned; by rank,
        of the workers that are there. Unless it `trains`, nothing is sent of it."""
        rule, turn = self._rule, self._turns[at]
        if at in self._sent and self._sent[at][0] == step:
            weights = self._taken(at, weights)
        if trains and step % rule.steps == turn.first % rule.steps:
            before = self.values[at]
            self._sent[at] = step + turn.lag, {rank: one.copy() for rank, one in weights.items()}
            mean = sum(before - one for one in weights.values())
            mean /= np.float32(1 if rule.adds else len(weights))
            velocity = self._velocities[at]
            velocity *= np.float32(rule.momentum)
            velocity += mean
            change = mean + np.float32(rule.momentum) * velocity if rule.momentum else mean
            self.values[at] = before - np.float32(rule.rate) * change
            if not turn.lag:
                weights = self._taken(at, weights)
        return weights

    def forget_sent(self) -> None:
        """Values that are under way are taken by nobody."""
        self._sent.clear()

    def average(self, at: int, weights: Dict[int, np.ndarray]) -> None:
        """Has a value be the mean of the workers' weights, out of turn."""
        if at in self._sent:
            weights = self._taken(at, weights)
        mean = sum(self.values[at] - one for one in weights.values())
        mean /= np.float32(1 if self._rule.adds else len(weights))
        self.values[at] = self.values[at] - mean

    def _taken(self, at: int, weights: Dict[int, np.ndarray]) -> Dict[int, np.ndarray]:
        _, sent = self._sent.pop(at)
        return {rank: (one - sent[rank]) + self.values[at] for rank, one in weights.items()}
