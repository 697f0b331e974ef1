"""Log of connections that do not belong to the job."""

from __future__ import annotations

import logging

_MAX_CHARS = 600


class Refusals:
    """Logs the 1st, 2nd, 4th, 8th ... refusal, at most `_MAX_CHARS` of each, so that nobody can
    fill a disk by connecting."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def note(self, reason: str) -> None:
        """Counts a refusal; `reason` says what was wrong with the connection."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            self._log.warning(
                "refused a connection (number %d): %s", self._count, reason[:_MAX_CHARS]
            )
