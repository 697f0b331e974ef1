"""The outer optimizer that servers run for workers that train by themselves."""

from __future__ import annotations

from typing import Any, Optional

from p3kv.consistency import LocalTraining
from p3kv.server.optimizer import OUTER
from p3kv.server.outer import OuterSettings
from p3kv.store.resuming import Resuming
from p3kv.store.script_optimizer import ScriptOptimizer
from p3kv.wire.messages import encode


class OuterOptimizer(ScriptOptimizer):
    """What the servers must be told of it: once, since nothing changes it."""

    name = "the outer one"
    front_end = OUTER

    def __init__(self, rule: LocalTraining, workers: int) -> None:
        self._settings = OuterSettings(rule.rate, rule.momentum, 1 if rule.adds else workers)

    @property
    def settings(self) -> bytes:
        return encode(self._settings)

    def begin_step(self, step: int, updates: int) -> Optional[bytes]:
        return None

    def has_changed(self) -> bool:
        """Says so of each step, so that each has a number: keys that take turns leave in the order
        of these."""
        return True


def set_outer_optimizer(resuming: Resuming[Any], rule: LocalTraining, workers: int) -> None:
    """Has the servers update a store's values by the mean of what so many workers push."""
    resuming.set_optimizer(OuterOptimizer(rule, workers))
