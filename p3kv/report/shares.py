"""Shares of steps' time, and words for them: the same wherever people read them."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

from p3kv.wire.messages import WorkerNumbers

COMPUTE, SCRIPT, NETWORK, SERVER, STRAGGLER, PROCESSOR = PARTS = (
    "computing", "script", "network", "server", "straggler", "processor",
)  # fmt: skip
"""The parts of a step. `WorkerNumbers` has the seconds of each."""

_IS = {
    COMPUTE: "computing",
    SCRIPT: "the script's own time between steps",
    NETWORK: "waiting for the network",
    SERVER: "waiting for busy servers",
    STRAGGLER: "waiting for a slow worker",
    PROCESSOR: "waiting for a free processor",
}
_LEAST = 0.005
"""A smaller share would be shown as 0%."""


def shares(numbers: WorkerNumbers, before: Optional[WorkerNumbers] = None) -> Dict[str, float]:
    """By part, its share of the time of all steps since `before`; empty without any step."""
    since = WorkerNumbers() if before is None else before
    step_s = numbers.step_s - since.step_s
    if numbers.steps <= since.steps or step_s <= 0:
        return {}
    taken = {part: getattr(numbers, f"{part}_s") - getattr(since, f"{part}_s") for part in PARTS}
    return {part: max(0.0, seconds) / step_s for part, seconds in taken.items()}


def in_short(of: Mapping[str, float], most: int = len(PARTS)) -> str:
    """'computing 60%, network 40%', the largest share first; so many at most."""
    return ", ".join(f"{part} {share:.0%}" for part, share in list(_by_size(of).items())[:most])


def in_words(of: Mapping[str, float]) -> str:
    """'60% is computing, 40% waiting for the network', the largest share first."""
    words = ", ".join(f"{share:.0%} {_IS[part]}" for part, share in _by_size(of).items())
    return words.replace("% ", "% is ", 1)


def _by_size(of: Mapping[str, float]) -> Dict[str, float]:
    large = [(part, share) for part, share in of.items() if share >= _LEAST]
    return dict(sorted(large, key=lambda one: -one[1]))
