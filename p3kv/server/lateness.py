"""Worker whose gradient is ready last in each round, and how long the others' wait for it."""

from __future__ import annotations

import time
from typing import List, Optional

from p3kv.server.engine.rounds import Round
from p3kv.wire.header import CLOCK_US

_REMEMBERED_S = 30.0
"""For how long at least a worker's quickest frame counts. Clocks drift apart by a millisecond or
two in twice this time."""

_HALF = CLOCK_US // 2

now_s = time.monotonic


class Readiness:
    """When workers' gradients were ready, on this process's clock, whatever their ways take.

    A frame says when its gradient was ready, on the worker's clock. What its arrival is later than
    that is the difference of the clocks and the time on the way. The quickest of many frames was
    hardly on its way, so it tells the difference; what another frame takes more than that was its
    way.
    """

    def __init__(self, num_workers: int) -> None:
        self._quickest: List[Optional[int]] = [None] * num_workers
        self._before = self._quickest
        """By rank, the shortest time between ready and arrived; and that of a while ago."""
        self._since_s = now_s()

    def ready_s(self, rank: int, time_us: int) -> float:
        """When the gradient of a frame was ready that has just arrived; `time_us` is what its
        header says of that."""
        arrived_s = now_s()
        if arrived_s > self._since_s + _REMEMBERED_S:
            self._before, self._quickest = self._quickest, [None] * len(self._quickest)
            self._since_s = arrived_s
        took_us = int(arrived_s * 1e6) - time_us
        known, before = self._quickest[rank], self._before[rank]
        # As in `passed_s`, without two calls for each push.
        way_us = -1 if known is None else (took_us - known + _HALF) % CLOCK_US - _HALF
        if way_us < 0:
            self._quickest[rank] = took_us
            way_us = 0
        if before is not None:
            way_us = max(way_us, (took_us - before + _HALF) % CLOCK_US - _HALF)
        return arrived_s - way_us / 1e6


class Lateness:
    """Counts the rounds of slices by the worker whose gradient was ready last.

    A worker comes last by the time between its gradient and the one before it. Among workers that
    are alike each comes last about as often, by little. How long pushes are on their way does not
    count: that is the network's time. Belongs to the server's thread.
    """

    def __init__(self, num_workers: int) -> None:
        self.rounds = 0
        self.last_rounds: List[int] = [0] * num_workers
        self.last_s: List[float] = [0.0] * num_workers

    def note_push(self, current: Round, rank: int, ready_s: float) -> None:
        """Takes note of a worker's push for a round, which has counted it."""
        ready = current.ready_s
        ready[rank] = ready_s
        if 1 < len(current.arrived) == len(self.last_s) == len(ready):
            last = max(ready, key=ready.__getitem__)
            *_, before_s, last_s = sorted(ready.values())
            self.rounds += 1
            self.last_rounds[last] += 1
            self.last_s[last] += last_s - before_s
