"""Measurements of a worker, and all ways in which it tells people of them."""

from __future__ import annotations

import logging
import time
from typing import Any, Collection, Dict, List, Optional, Tuple

from msgspec import structs

from p3kv.common import words
from p3kv.common.log import REPORTS
from p3kv.config import Settings
from p3kv.report import Verdict, rates, verdict
from p3kv.report.forecast import Workload
from p3kv.report.forecast.simulator import FLOAT32_BYTES
from p3kv.report.metrics import Metrics
from p3kv.report.verdict import lag_words, with_own
from p3kv.wire.messages import MAX_LAYER_CHARS, Lag, WorkerNumbers
from p3kv.worker.data_plane import DataPlane
from p3kv.worker.job import JobMember
from p3kv.worker.transfers import WorkerKey

_WORTH_A_VERDICT_S = 30.0
"""A shorter training gets a verdict only if summaries were asked for."""

_log = logging.getLogger(REPORTS)


class Measures:
    """Gives scripts, the scheduler and Prometheus the worker's numbers from `begin` on, and logs
    them. From any thread."""

    def __init__(self, job: JobMember, num_workers: int) -> None:
        self._job = job
        self._num_workers = num_workers
        self._plane: Optional[DataPlane] = None
        """The data plane, from `begin` on."""
        self._local_servers: Collection[int] = ()
        self._summing = 1
        self._push_bytes_s = 0.0
        self._began_s = 0.0
        self._found: Optional[Tuple[int, Optional[Verdict]]] = None
        """After how many steps the verdict was reached that `stats` gives, and the verdict."""
        self._metrics: Optional[Metrics] = None
        self._every_steps = 0
        self._last = WorkerNumbers()
        """The numbers in the last line that was logged."""

    def begin(
        self,
        data_plane: DataPlane,
        settings: Settings,
        local_servers: Collection[int],
        summing: int,
        push_bytes_s: Optional[float],
    ) -> None:
        """Measure from now on. `local_servers`: the ranks of the servers on this host. `summing`:
        how many workers of each host send as one. `push_bytes_s`: how fast this worker can send
        while all workers do, if that was measured. ConfigError where metrics can't be told."""
        _log.setLevel(logging.INFO)
        self._local_servers, self._summing = local_servers, summing
        self._push_bytes_s = push_bytes_s or 0.0
        self._began_s = time.monotonic()
        self._every_steps = settings.summary_every
        self._plane = data_plane
        self._last = self.numbers()
        data_plane.times.on_step = self._log_if_due
        self._metrics = Metrics(settings, "worker", data_plane.rank, self.told)

    @property
    def _data_plane(self) -> DataPlane:
        assert self._plane is not None
        return self._plane

    def told(self) -> Optional[WorkerNumbers]:
        """Measurements of this worker so far, if it has begun."""
        return None if self._plane is None else self.numbers()

    @property
    def slowest(self) -> Optional[Lag]:
        """For which worker the others wait, if that is known."""
        return self._job.control.slowest

    def numbers(self) -> WorkerNumbers:
        """Measurements of this worker so far."""
        servers = list(self._data_plane.servers.items())
        wire = [connection for rank, connection in servers if rank not in self._local_servers]
        times, inversions = self._data_plane.times, self._job.loop.inversions
        return WorkerNumbers(
            uptime_s=time.monotonic() - self._began_s,
            **self._data_plane.counts,
            inversions=inversions.frames,
            inversion_bytes=inversions.bytes,
            wire_bytes_sent=sum(connection.sent_bytes for connection in wire),
            wire_bytes_received=sum(connection.received_bytes for connection in wire),
            steps=times.steps,
            step_s=times.step_s,
            **times.parts._asdict(),
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            push_bytes_s=self._push_bytes_s,
            queued_frames=sum(len(connection.writer) for _, connection in servers),
            slowest_layer=layer_name(times.waited_for),
        )

    def verdict(self) -> Optional[Verdict]:
        """Whether the network is the limit, as far as this worker can tell; None if it is too
        early."""
        return verdict(
            self._of_senders(), self._workload(), self._num_senders, self.slowest,
            self._data_plane.rank,
        )  # fmt: skip

    @property
    def _num_senders(self) -> int:
        """How many workers there were if those that send as one were one."""
        return -(-self._num_workers // self._summing)

    def _of_senders(self) -> WorkerNumbers:
        """The numbers of all workers that send as one: they share a link, and each sends a part."""
        numbers = self.numbers()
        return structs.replace(
            numbers,
            bytes_sent=numbers.bytes_sent * self._summing,
            bytes_received=numbers.bytes_received * self._summing,
            push_bytes_s=numbers.push_bytes_s * self._summing,
        )

    def lines(self) -> List[str]:
        """The verdict for people; it takes some tenths of a second."""
        found = self.verdict()
        if found is None:
            return []
        if any(layer.key.touched_only for layer in self._data_plane.times.layers()):
            return found.lines  # the others send rows, too, and the workload has whole tensors
        own = words.current().own
        compared = with_own(own, found, self._workload(), self._num_workers, self._summing)
        return found.lines if compared is None else [*found.lines, compared]

    def _workload(self) -> Workload:
        layers = self._data_plane.times.layers()
        return Workload(
            [[(layer.key.key_id, layer.key.size_bytes // FLOAT32_BYTES)] for layer in layers],
            [layer.forward_s for layer in layers],
            [layer.backward_s for layer in layers],
        )

    def stats(self) -> Dict[str, Any]:
        """The numbers by name, `links` and `rounds`, the worker that the others wait for, and the
        verdict."""
        steps = self._data_plane.times.steps
        if self._found is None or self._found[0] != steps:  # scripts may ask all the time
            self._found = steps, self.verdict()
        slowest, found = self.slowest, self._found[1]
        return {
            **nothing_measured(),
            **structs.asdict(self.numbers()),
            "links": {
                f"server {rank}": {
                    "bytes_sent": connection.sent_bytes,
                    "bytes_received": connection.received_bytes,
                    "same_host": rank in self._local_servers,
                    "worked_s": self._data_plane.times.work.total_s(rank),
                }
                for rank, connection in list(self._data_plane.servers.items())
            },
            "rounds": {key.key: key.round for key in list(self._data_plane.keys.values())},
            "travels": {key.key: key.travels for key in list(self._data_plane.keys.values())},
            "slowest_worker": None if slowest is None else structs.asdict(slowest),
            "verdict": None
            if found is None
            else {**found._asdict(), "slowest": None, "lines": found.lines},
        }

    def _log_if_due(self, steps: int) -> None:
        """Logs a line when so many steps have ended; in the worker's thread."""
        if not self._every_steps or steps % self._every_steps:
            return
        numbers = self.numbers()
        between, self._last = rates(self._last, numbers), numbers
        slowest = self.slowest
        behind = f"; {lag_words(slowest)}" if slowest is not None else ""
        _log.info("step %d: %s%s", steps, between.words, behind)

    def end(self, rank: int) -> None:
        """Logs the verdict, on worker rank 0."""
        if self._plane is None or rank != 0:
            return
        if self._every_steps or self.numbers().step_s > _WORTH_A_VERDICT_S:
            for line in self.lines():
                _log.info("%s", line)

    def close(self) -> None:
        """Serves no metrics any more; may be called twice."""
        if self._metrics is not None:
            self._metrics.close()

    def close_in_child(self) -> None:
        """In a forked child: closes its copy of the port."""
        if self._metrics is not None:
            self._metrics.close_in_child()


def layer_name(waited_for: Optional[WorkerKey]) -> str:
    """The parameter's name as tables have room for it; empty without a layer."""
    if waited_for is None:
        return ""
    return (waited_for.declared.name or waited_for.called)[:MAX_LAYER_CHARS]


def nothing_measured() -> Dict[str, Any]:
    """Result of `stats` where nothing is sent: zeros."""
    return {
        **structs.asdict(WorkerNumbers()),
        "links": {}, "rounds": {}, "travels": {}, "slowest_worker": None, "verdict": None,
    }  # fmt: skip
