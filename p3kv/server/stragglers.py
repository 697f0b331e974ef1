"""Stragglers: whose gradient is ready last in each round, by how much, and for whom rounds wait so
long that all workers are told, and in the end the job fails."""

from __future__ import annotations

import math
import time
from typing import Any, Iterable, List, Optional, Union

from p3kv.server.engine import Blame, Round, Wait
from p3kv.wire.header import CLOCK_US, INITIAL_ROUND
from p3kv.wire.messages import Stalled, waited
from p3kv.wire.silence import OwnPauses

LOOK_EVERY_S = 1.0
"""How often `Stalls.look` is to be called."""

_HINT = (
    "It is stopped or very slow, or it does not train the same parameters as the others, the same "
    "number of times."
)

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

    def note(self, ended: Round[Any]) -> None:
        """Counts a round that has ended, if all workers have pushed for it."""
        ready = ended.ready_s
        if 1 < len(ready) == len(self.last_s):
            last = max(ready, key=ready.__getitem__)
            *_, before_s, last_s = sorted(ready.values())
            self.rounds += 1
            self.last_rounds[last] += 1
            self.last_s[last] += last_s - before_s


class Stalls:
    """Reports the round that has waited longest.

    Tells the workers when the round has waited for `warn_after_s`, or half the timeout if that is
    less, and again whenever that time has doubled. After `timeout_s`, and its patience, the job
    fails. Time before the end of the server's own last pause does not count. Belongs to the
    server's thread.
    """

    def __init__(self, warn_after_s: float, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._warn_after_s = warn_after_s
        self._told_wait_s = 0.0
        self._own_pauses = OwnPauses(LOOK_EVERY_S)
        self._runs_since_s = -math.inf

    @property
    def first_s(self) -> float:
        """How long a round waits before it counts as stalled."""
        return min(self._warn_after_s, self._timeout_s / 2)

    def look(self, waits: Iterable[Wait], now_s: float) -> Union[Stalled, Blame, None]:
        """What is to be said of the first of `waits`, the longest, if that is new; each is at least
        `first_s` long."""
        if self._own_pauses.look(now_s):
            self._runs_since_s = now_s
        longest: Optional[Wait] = next(iter(waits), None)
        waited_s = 0.0 if longest is None else now_s - max(longest.since_s, self._runs_since_s)
        if longest is None or waited_s < self.first_s:
            self._told_wait_s = 0.0
            return None
        if waited_s < self._told_wait_s:
            self._told_wait_s = 0.0  # another one
        if waited_s >= self._timeout_s + longest.patience_s:
            return Blame(longest.missing[0], self._reason(longest, waited_s), _HINT)
        if waited_s >= 2 * self._told_wait_s:
            self._told_wait_s = waited_s
            return longest.message(waited_s, self._timeout_s)
        return None

    def _reason(self, wait: Wait, waited_s: float) -> str:
        if wait.round == INITIAL_ROUND:
            what = f"it has not given {wait.record.plan.called} its initial value"
        else:
            what = f"it has not pushed {wait.record.plan.called} in round {wait.round}"
        return f"{what}, {waited(wait.arrived, waited_s)} (P3KV_STALL_TIMEOUT_S)"
