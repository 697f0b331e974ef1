"""All ways in which a worker tells people what it measures."""

from __future__ import annotations

import logging
from typing import Any, Collection, Dict, Optional

from p3kv.common.log import REPORTS
from p3kv.config import Settings
from p3kv.report import rates
from p3kv.report.metrics import Metrics
from p3kv.report.verdict import lag_words
from p3kv.wire.control import ControlClient
from p3kv.wire.loop import Loop
from p3kv.wire.messages import WorkerNumbers
from p3kv.worker.data_plane import DataPlane
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


class Reporting:
    """Numbers for scripts, the scheduler and Prometheus, and lines in the log; from `begin` on."""

    def __init__(self, loop: Loop, num_workers: int) -> None:
        self._loop = loop
        self._num_workers = num_workers
        self._measures: Optional[Measures] = None
        self._summary: Optional[Summary] = None
        self._metrics: Optional[Metrics] = None

    def begin(
        self,
        data_plane: DataPlane,
        control: ControlClient,
        settings: Settings,
        local_servers: Collection[int],
        summing: int,
        push_bytes_s: Optional[float],
    ) -> None:
        """Says what is to be told, and how: see `Measures`. ConfigError if metrics can't be."""
        self._measures = Measures(
            self._loop, data_plane, control, self._num_workers, local_servers, summing,
            push_bytes_s or 0.0,
        )  # fmt: skip
        self._summary = Summary(self._measures, settings)
        data_plane.times.on_step = self._summary.look
        self._metrics = Metrics(settings, "worker", data_plane.rank, self.numbers)

    def numbers(self) -> Optional[WorkerNumbers]:
        """Measurements of the worker; from any thread."""
        return None if self._measures is None else self._measures.numbers()

    def stats(self) -> Dict[str, Any]:
        """The same for scripts, with what the worker has been told."""
        assert self._measures is not None
        return self._measures.stats()

    def end(self, rank: int) -> None:
        """Logs the verdict, if this worker is the one to do so."""
        if self._summary is not None:
            self._summary.end(rank)

    def close(self) -> None:
        """Serves no metrics any more; may be called twice."""
        if self._metrics is not None:
            self._metrics.close()

    def close_in_child(self) -> None:
        """In a forked child: closes its copy of the port."""
        if self._metrics is not None:
            self._metrics.close_in_child()
