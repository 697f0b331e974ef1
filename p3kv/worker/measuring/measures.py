"""Measurements of a worker, from all the places that count."""

from __future__ import annotations

import time
from typing import Any, Collection, Dict, List, Optional, Tuple

from msgspec import structs

from p3kv.common import words
from p3kv.report import Verdict, verdict
from p3kv.report.forecast import Workload
from p3kv.report.forecast.simulator import FLOAT32_BYTES
from p3kv.report.verdict import with_own
from p3kv.wire.control import ControlClient
from p3kv.wire.loop import Loop
from p3kv.wire.messages import MAX_LAYER_CHARS, Lag, WorkerNumbers
from p3kv.worker.data_plane import DataPlane
from p3kv.worker.transfers import WorkerKey


class Measures:
    """Reads the worker's numbers; from any thread."""

    def __init__(
        self,
        loop: Loop,
        data_plane: DataPlane,
        control: ControlClient,
        num_workers: int,
        local_servers: Collection[int],
        summing: int,
        push_bytes_s: float,
    ) -> None:
        """`local_servers` are the ranks of the servers on this host. `summing`: how many workers of
        each host send as one. `push_bytes_s`: how fast this worker can send while all workers do; 0
        if that was not measured."""
        self._loop = loop
        self._data_plane = data_plane
        self._began_s = time.monotonic()
        self._num_workers = num_workers
        self._local_servers = local_servers
        self._summing = summing
        self._control = control
        self._push_bytes_s = push_bytes_s
        self._found: Optional[Tuple[int, Optional[Verdict]]] = None
        """After how many steps the verdict was reached that `stats` gives, and the verdict."""

    @property
    def slowest(self) -> Optional[Lag]:
        """For which worker the others wait, if that is known."""
        return self._control.slowest

    def numbers(self) -> WorkerNumbers:
        """Measurements of this worker so far."""
        servers = list(self._data_plane.servers.items())
        wire = [connection for rank, connection in servers if rank not in self._local_servers]
        times, inversions = self._data_plane.times, self._loop.inversions
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
