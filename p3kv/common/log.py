"""How p3kv's lines in logs begin, and when to log again that this process still waits."""

from __future__ import annotations

import logging

REPORTS = "p3kv.report"
"""The logger of what users have asked for: it speaks whatever the verbosity."""


class LogFormatter(logging.Formatter):
    """Marks each line with the process, and what was asked for also with rank and time. Warnings
    come without these: they name the processes that they are about."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self.rank = ""

    def format(self, record: logging.LogRecord) -> str:
        said = super().format(record)
        if record.levelno >= logging.WARNING:
            whose = f"{self._role}{self.rank}"
            itself = said.startswith((f"{whose}: ", f"{whose} (round "))
            return f"p3kv {said}" if itself else f"p3kv {self._role}: {said}"
        clock = f"{self.formatTime(record, '%H:%M:%S')}.{record.msecs:03.0f}"
        return f"p3kv {self._role}{self.rank} {clock}: {said}"


def name_rank(rank: int) -> None:
    """Name this process's rank in its lines from now on."""
    for handler in logging.getLogger("p3kv").handlers:
        if isinstance(handler.formatter, LogFormatter):
            handler.formatter.rank = f" {rank}"


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
