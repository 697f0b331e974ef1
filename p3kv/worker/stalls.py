"""Warnings that a worker logs when a round waits for a straggler."""

from __future__ import annotations

import logging
import math
import time
from typing import Dict, Tuple

from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Stalled, workers

_log = logging.getLogger(__name__)


class StallWarnings:
    """Warns of rounds that wait, once for all servers that report them."""

    def __init__(self) -> None:
        self._warned_at_s: Dict[Tuple[int, ...], float] = {}
        """By the workers that are missing: if two workers wait for each other, both are logged."""

    def note(self, stalled: Stalled, rank: int, declared: bool) -> None:
        """Warns if this is new. `rank` is this worker's; `declared` says whether it has initialised
        the key."""
        now_s = time.monotonic()
        # Each server reports for itself, and again when the wait has doubled.
        missing = tuple(stalled.missing)
        if now_s - self._warned_at_s.get(missing, -math.inf) < stalled.waited_s / 2:
            return
        self._warned_at_s[missing] = now_s
        _log.warning("%s", _words(stalled, rank, declared))


def _words(stalled: Stalled, rank: int, declared: bool) -> str:
    missing, arrived = workers(stalled.missing), workers(stalled.arrived)
    have = "has" if len(stalled.missing) == 1 else "have"
    if stalled.round == INITIAL_ROUND:
        what = f"{missing} {have} not given {stalled.called} its initial value"
    else:
        what = f"{missing} {have} not pushed {stalled.called} in round {stalled.round}"
    if rank in stalled.missing:
        mine = "That is this worker"
        mine += "." if declared else ", which has never initialised it."
    else:
        mine = "Its own output may say why."
    left_s = max(0, math.floor(stalled.timeout_s - stalled.waited_s))
    return (
        f"{what}, for which {arrived} waited {math.floor(stalled.waited_s)} s. {mine} All workers "
        "must train the same parameters, the same number of times. The job ends if nothing comes "
        f"for another {left_s} s (P3KV_STALL_TIMEOUT_S)."
    )
