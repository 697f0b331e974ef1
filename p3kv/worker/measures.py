"""What a worker has measured, from all the places that count."""

from __future__ import annotations

from typing import Any, Collection, Dict, Optional

from msgspec import structs

from p3kv.wire.loop import Loop
from p3kv.wire.messages import MAX_LAYER_CHARS, Lag, WorkerNumbers
from p3kv.worker.traffic import Traffic


class Measures:
    """Reads the worker's numbers; from any thread."""

    def __init__(
        self, loop: Loop, traffic: Traffic, local_servers: Collection[int], push_bytes_s: float
    ) -> None:
        """`local_servers` are the ranks of the servers on this host. `push_bytes_s`: how fast this
        worker can send while all workers do; 0 if that was not measured."""
        self._loop = loop
        self._traffic = traffic
        self._local_servers = local_servers
        self._push_bytes_s = push_bytes_s

    def numbers(self) -> WorkerNumbers:
        """What this worker has measured so far."""
        servers = list(self._traffic.servers.items())
        wire = [connection for rank, connection in servers if rank not in self._local_servers]
        times, inversions = self._traffic.times, self._loop.inversions
        slowest = times.waited_for
        return WorkerNumbers(
            **self._traffic.exchange.counts,
            inversions=inversions.frames,
            inversion_bytes=inversions.bytes,
            wire_bytes_sent=sum(connection.sent_bytes for connection in wire),
            wire_bytes_received=sum(connection.received_bytes for connection in wire),
            steps=times.steps,
            step_s=times.step_s,
            waiting_s=times.waiting_s,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            push_bytes_s=self._push_bytes_s,
            queued_frames=sum(len(connection.writer) for _, connection in servers),
            slowest_layer=slowest.called[:MAX_LAYER_CHARS] if slowest else "",
        )

    def stats(self, slowest: Optional[Lag]) -> Dict[str, Any]:
        """The numbers by name, `links` and `rounds`, and the worker that the others wait for."""
        return {
            **structs.asdict(self.numbers()),
            "links": {
                f"server {rank}": {
                    "bytes_sent": connection.sent_bytes,
                    "bytes_received": connection.received_bytes,
                    "same_host": rank in self._local_servers,
                }
                for rank, connection in list(self._traffic.servers.items())
            },
            "rounds": {key.key: key.round for key in list(self._traffic.keys.values())},
            "slowest_worker": None if slowest is None else structs.asdict(slowest),
        }
