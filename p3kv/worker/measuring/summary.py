"""Log of a worker's speed: a line every so many steps, and a verdict at the end."""

from __future__ import annotations

import logging

from p3kv.common.log import REPORTS
from p3kv.config import Settings
from p3kv.report import rates
from p3kv.report.verdict import lag_words
from p3kv.worker.measuring.measures import Measures

_WORTH_A_VERDICT_S = 30.0
"""A shorter training gets a verdict only if summaries were asked for."""

_log = logging.getLogger(REPORTS)


class Summary:
    """Logs what a worker measures. `look` belongs to the worker's thread."""

    def __init__(self, measures: Measures, settings: Settings) -> None:
        _log.setLevel(logging.INFO)
        self._measures = measures
        self._every = settings.summary_every
        self._last = measures.numbers()

    def look(self, steps: int) -> None:
        """Logs a line if it is time; to be called when a step has ended."""
        if not self._every or steps % self._every:
            return
        numbers = self._measures.numbers()
        between, self._last = rates(self._last, numbers), numbers
        slowest = self._measures.slowest
        behind = f"; {lag_words(slowest)}" if slowest is not None else ""
        _log.info("step %d: %s%s", steps, between.words, behind)

    def end(self, rank: int) -> None:
        """Logs the verdict, on worker rank 0."""
        if rank == 0 and (self._every or self._measures.numbers().step_s > _WORTH_A_VERDICT_S):
            for line in self._measures.lines():
                _log.info("%s", line)
