"""Stalls: rounds that wait for a worker. All workers are told, and in the end the job fails."""

from __future__ import annotations

import math
from typing import Callable, Iterable, List, NamedTuple, Optional

from p3kv.server.engine import Unit
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Stalled, waited
from p3kv.wire.silence import OwnPauses

LOOK_EVERY_S = 1.0
"""How often `Stalls.look` is to be called."""

_HINT = (
    "It is stopped or very slow, or it does not train the same parameters as the others, the same "
    "number of times."
)


class Wait(NamedTuple):
    """A round of a slice, or of a key of rows, that can't end yet."""

    unit: Unit
    round: int
    missing: List[int]
    """Ranks of the workers that have not pushed."""
    arrived: List[int]
    """Ranks of the workers that have pushed, or that wait for the initial value."""
    since_s: float
    """Since when, on the monotonic clock."""
    patience_s: float = 0.0
    """For how long of this nobody may have waited, since workers go on by themselves."""

    def message(self, waited_s: float, timeout_s: float) -> Stalled:
        """The message that tells workers of it."""
        return Stalled(
            self.unit.plan.key_id, self.unit.plan.called, self.round, self.missing, self.arrived,
            waited_s, timeout_s + self.patience_s,
        )  # fmt: skip


class Stalls:
    """Reports the round that has waited longest.

    Tells the workers when the round has waited for `warn_after_s`, or half the timeout if that is
    less, and again whenever that time has doubled. After `timeout_s`, and its patience, the job
    fails. Time before the end of the server's own last pause does not count. Belongs to the
    server's thread.
    """

    def __init__(
        self,
        warn_after_s: float,
        timeout_s: float,
        tell: Callable[[Stalled], None],
        give_up: Callable[[int, str, str], None],
    ) -> None:
        """`give_up(rank, reason, hint)` ends the job because of a missing worker."""
        self._timeout_s = timeout_s
        self._warn_after_s = warn_after_s
        self._tell = tell
        self._give_up = give_up
        self._told_wait_s = 0.0
        self._own_pauses = OwnPauses(LOOK_EVERY_S)
        self._runs_since_s = -math.inf

    @property
    def first_s(self) -> float:
        """How long a round waits before it counts as stalled."""
        return min(self._warn_after_s, self._timeout_s / 2)

    def look(self, waits: Iterable[Wait], now_s: float) -> None:
        """Reports the first of `waits`, the longest, if that is new; each is at least `first_s`
        long."""
        if self._own_pauses.look(now_s):
            self._runs_since_s = now_s
        longest: Optional[Wait] = next(iter(waits), None)
        waited_s = 0.0 if longest is None else now_s - max(longest.since_s, self._runs_since_s)
        if longest is None or waited_s < self.first_s:
            self._told_wait_s = 0.0
            return
        if waited_s < self._told_wait_s:
            self._told_wait_s = 0.0  # another one
        if waited_s >= self._timeout_s + longest.patience_s:
            self._give_up(longest.missing[0], self._reason(longest, waited_s), _HINT)
        elif waited_s >= 2 * self._told_wait_s:
            self._told_wait_s = waited_s
            self._tell(longest.message(waited_s, self._timeout_s))

    def _reason(self, wait: Wait, waited_s: float) -> str:
        if wait.round == INITIAL_ROUND:
            what = f"it has not given {wait.unit.plan.called} its initial value"
        else:
            what = f"it has not pushed {wait.unit.plan.called} in round {wait.round}"
        return f"{what}, {waited(wait.arrived, waited_s)} (P3KV_STALL_TIMEOUT_S)"
