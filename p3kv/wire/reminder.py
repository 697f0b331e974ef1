"""When to log again that this process still waits."""

from __future__ import annotations

_FIRST_S = 5.0


class Reminder:
    """Due 5 s after `since`, on the monotonic clock, and then at intervals that double."""

    def __init__(self, since: float) -> None:
        self.at = since + _FIRST_S
        self._interval_s = _FIRST_S

    def is_due(self, now: float) -> bool:
        """Whether to log now; True once for each time that it is due."""
        if now < self.at:
            return False
        self._interval_s *= 2
        self.at = now + self._interval_s
        return True

    def postpone(self, now: float) -> None:
        """Something arrived: is not due in the next 5 s."""
        self.at = max(self.at, now + _FIRST_S)
