"""Which worker's push comes last in each round, and for how long the others' have waited for it."""

from __future__ import annotations

import time
from typing import List

from p3kv.server.slice_states import Round

now_s = time.monotonic


class Lateness:
    """Counts the rounds of slices by the worker that has completed them.

    A worker comes last by the time between its push and the one before it. Among workers that are
    alike each comes last about as often, by little. Belongs to the server's thread.
    """

    def __init__(self, num_workers: int) -> None:
        self.rounds = 0
        self.last_rounds: List[int] = [0] * num_workers
        self.last_s: List[float] = [0.0] * num_workers

    def pushed(self, current: Round, rank: int) -> None:
        """Takes note of a worker's push for a round, which has counted it."""
        now = now_s()
        if 1 < len(current.arrived) == len(self.last_s):
            self.rounds += 1
            self.last_rounds[rank] += 1
            self.last_s[rank] += now - current.newest_s
        current.newest_s = now
