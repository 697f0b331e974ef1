"""Where the script was between two steps, as its front end says."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

_SHORT_S = 0.0001
"""Whoever waits for less finds what it reads."""


class Between(NamedTuple):
    """Times of the script after a step's last push and before the next step's first one."""

    forward_s: float
    """When it began the forward pass; 0 if that is not known."""
    blocked: List[Tuple[float, float]]
    """From when to when it waited for arrays."""


class ScriptTimes:
    """Keeps what the script does after each step. Its thread writes, and the worker's takes."""

    def __init__(self) -> None:
        self._forwards_s: Dict[int, float] = {}
        self._blocked: Dict[int, List[Tuple[float, float]]] = {}

    def forward_begins(self, step: int, at_s: float) -> bool:
        """Takes note of a forward pass of training after a step, if it is the first one; returns
        whether it is."""
        return self._forwards_s.setdefault(step, at_s) == at_s

    def blocked(self, step: int, begin_s: float, end_s: float) -> None:
        """Takes note that the script waited for arrays."""
        if end_s - begin_s > _SHORT_S:
            self._blocked.setdefault(step, []).append((begin_s, end_s))

    def take_blocked(self) -> List[Tuple[float, float]]:
        """Takes all waits for arrays so far, where steps have no first gradient."""
        steps = list(self._blocked)
        return [wait for step in steps for wait in self._blocked.pop(step, [])]

    def take(self, step: int) -> Between:
        """Takes the script's times after a step; forgets these and those before."""
        found = Between(self._forwards_s.get(step, 0.0), self._blocked.get(step, []))
        for old in {*list(self._forwards_s), *list(self._blocked)}:
            if old <= step:
                self._forwards_s.pop(old, None)
                self._blocked.pop(old, None)
        return found
