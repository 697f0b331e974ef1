"""Measures this worker's network before the first key: how fast slices will travel."""

from __future__ import annotations

import time
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import MAX_PROBE_BYTES, URGENT, Kind
from p3kv.wire.messages import Measured

_SETTLE_S, _MEASURE_S = 0.05, 0.2
_FRAMES_AHEAD = 2
_NOTHING = memoryview(bytes(MAX_PROBE_BYTES))


class Probe:
    """Has all servers echo frames for a quarter of a second, and counts the bytes.

    All workers do so at the same time, so that they share links as they will in training.
    Belongs to the worker's thread.
    """

    def __init__(
        self, rank: int, servers: Mapping[int, Connection], done: Callable[[Measured], None]
    ) -> None:
        """Calls `done` with what was measured when all frames are back."""
        self._scratch = memoryview(bytearray(MAX_PROBE_BYTES))
        self._header = Header(Kind.PROBE, rank)
        self._servers = servers
        self._done = done
        self._sent_s = 0.0
        self._began_s: Optional[float] = None
        self._under_way: Dict[Connection, int] = {}
        """How many frames have left and are not back."""
        self._counted_bytes: Dict[Connection, int] = {}
        self._echoed: Dict[Connection, Tuple[int, float]] = {}
        """How many bytes have come back in all, and until when."""

    def begin(self) -> None:
        """Queues the first frames."""
        self._sent_s = time.monotonic()
        for connection in self._servers.values():
            self._counted_bytes[connection] = self._under_way[connection] = 0
            self._echoed[connection] = (0, self._sent_s)
            for _ in range(_FRAMES_AHEAD):
                self._send(connection)

    @property
    def silent(self) -> List[int]:
        """Ranks of the servers that have not sent all frames back; from any thread."""
        servers = self._servers.items()
        return [rank for rank, connection in servers if self._under_way.get(connection)]

    def land(self, connection: Connection, header: Header) -> Landing:
        """Where an echo's bytes go, which nobody reads; ProtocolError if nothing was sent."""
        if header.payload_bytes != len(self._scratch) or not self._under_way.get(connection):
            raise ProtocolError(f"it sent {header.payload_bytes} bytes back that nobody sent")
        return self._scratch, None

    def take(self, connection: Connection) -> None:
        """Counts an echo, and sends the next frame unless the time is over."""
        self._under_way[connection] -= 1
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
        self._echoed[connection] = (self._echoed[connection][0] + len(_NOTHING), now_s)
        elapsed_s = now_s - self._began_s
        if elapsed_s < _SETTLE_S + _MEASURE_S:
            if elapsed_s >= _SETTLE_S:
                self._counted_bytes[connection] += len(_NOTHING)
            self._send(connection)
        if not self.silent:
            self._done(Measured(self._rate_bytes_s(), self._flows_bytes_s()))

    def _send(self, connection: Connection) -> None:
        self._under_way[connection] += 1
        connection.writer.push(Frame(URGENT, self._header, _NOTHING))

    def _rate_bytes_s(self) -> float:
        # The slowest server decides: frames to a server on the worker's own host pass no network.
        return min(self._counted_bytes.values()) * len(self._servers) / _MEASURE_S

    def _flows_bytes_s(self) -> Tuple[float, ...]:
        """The rate to each server, by rank. On a slow network only a few frames come back, so all
        are counted."""
        echoed = (self._echoed[self._servers[server]] for server in sorted(self._servers))
        return tuple(size / (until_s - self._sent_s) for size, until_s in echoed)
