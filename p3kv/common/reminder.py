"""When to log again that this process still waits."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Callable, Iterator

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


@contextmanager
def reminding(remind: Callable[[], None]) -> Iterator[None]:
    """Calls `remind` in a thread of its own whenever it is due, while what is done inside waits
    and says nothing itself."""
    done = threading.Event()

    def watch() -> None:
        reminder = Reminder(time.monotonic())
        while not done.wait(reminder.at - time.monotonic()):
            if reminder.is_due(time.monotonic()):
                remind()

    threading.Thread(target=watch, name="p3kv reminder", daemon=True).start()
    try:
        yield
    finally:
        done.set()
