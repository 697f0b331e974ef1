"""All ways in which a worker tells people what it measures."""

from __future__ import annotations

from typing import Any, Collection, Dict, Optional

from p3kv.config import Settings
from p3kv.report.metrics import Metrics
from p3kv.wire.control import ControlClient
from p3kv.wire.loop import Loop
from p3kv.wire.messages import WorkerNumbers
from p3kv.worker.data_plane import DataPlane
from p3kv.worker.measuring.measures import Measures
from p3kv.worker.measuring.summary import Summary


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
