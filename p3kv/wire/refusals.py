"""What is said of those who knock and do not belong to the job."""

from __future__ import annotations

import logging

_MAX_CHARS = 600


class Refusals:
    """Logs the 1st, 2nd, 4th, 8th ... refusal, and not more than a paragraph of each, so that
    nobody can fill a disk by knocking."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def note(self, reason: str) -> None:
        """Takes note of one, whose `reason` says what was wrong with it."""
        self._count += 1
        if self._count & (self._count - 1) == 0:
            self._log.warning(
                "refused a stranger (number %d): %s", self._count, reason[:_MAX_CHARS]
            )
