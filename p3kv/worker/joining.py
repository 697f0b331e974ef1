"""How a worker joins: it connects to the servers and agrees on the slice size with all workers."""

from __future__ import annotations

import logging
import threading
import time
from typing import Callable, Dict, Optional, Set

from p3kv.config import Settings
from p3kv.errors import P3Error, ProtocolError
from p3kv.slicing import CREDIT_BYTES
from p3kv.wire import messages
from p3kv.wire.connection import Connection, connect
from p3kv.wire.control import ControlClient
from p3kv.wire.header import MAGIC, Header, Kind, pack_header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import (
    Agreed,
    DataHello,
    Failure,
    Measured,
    Ready,
    ReportFailure,
    Roster,
    SliceSize,
    encode,
)
from p3kv.worker.probe import Probe

_log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_WELCOME_S = 60.0
"""How long to wait for a server's welcome: it first imports what optimizers need."""


class Joining:
    """Connects this worker to all servers and agrees with the others on the size of slices.

    `place` and `received` belong to the worker's thread, all else to the thread that joins.
    """

    KINDS = (Kind.WELCOME, Kind.PROBE)
    """The kinds of frames that `place` and `received` take."""

    def __init__(
        self,
        control: ControlClient,
        loop: Loop,
        settings: Settings,
        roster: Roster,
        check: Callable[[], None],
        changed: threading.Condition,
    ) -> None:
        """All waits are on `changed`; `check` is called each time and raises the job's failure."""
        self._control = control
        self._loop = loop
        self._settings = settings
        self._roster = roster
        self._check = check
        self._changed = changed
        self._servers: Dict[int, Connection] = {}
        self._welcomed_by: Set[int] = set()
        self._probe: Optional[Probe] = None
        self._rate_bytes_s: Optional[float] = None

    def connect(self, make: Callable[..., Connection]) -> Dict[int, Connection]:
        """Returns the connections to all servers, by rank, with a hello sent on each.

        `make` takes a socket and the bytes that the kernel may hold. Raises ConfigError when
        workers have different settings, P3Error when a server can't be reached.
        """
        settings, roster = self._settings, self._roster
        ready = Ready(
            settings.slice_size,
            settings.deterministic,
            settings.stall_timeout_s,
            settings.placement,
        )
        self._control.request(ready, Agreed, "all workers to create their store")
        words = DataHello(roster.rank, settings.deterministic, settings.stall_timeout_s)
        hello = roster.token + encode(words)
        header = pack_header(
            Kind.HELLO,
            roster.rank,
            key=MAGIC,
            slice=messages.PROTOCOL_VERSION,
            payload_bytes=len(hello),
        )
        for server, address in enumerate(roster.servers):
            try:
                sock = connect(address, _CONNECT_S, header + hello)
            except OSError as error:
                raise self._blame(
                    server,
                    f"worker {roster.rank} can't connect to it at {address[0]}:{address[1]}: "
                    f"{error.strerror or error}",
                    "Is the address reachable from here? DMLC_INTERFACE or DMLC_NODE_HOST, set for "
                    "the server, choose another.",
                ) from error
            connection = make(sock, settings.send_buffer_bytes or CREDIT_BYTES)
            connection.peer = server
            self._servers[server] = connection
            self._loop.add_connection(connection)
        return self._servers

    def slice_size(self) -> int:
        """Waits until all servers have answered; returns the elements of a slice.

        Measures the network together with all workers if the size is not set. Raises P3Error when a
        server does not answer, and the job's failure.
        """
        self._wait_for_welcome()
        return self._settings.slice_size or self._measured_slice_size()

    def place(self, connection: Connection, header: Header) -> Optional[memoryview]:
        """Where a frame's payload goes; ProtocolError for one that must not come."""
        if header.kind == Kind.WELCOME and header.payload_bytes == 0:
            if header.rank != connection.peer:
                raise ProtocolError(f"it says to be server {header.rank}")
            return None
        if header.kind == Kind.PROBE and self._probe is not None:
            return self._probe.place(header)
        raise ProtocolError(f"it sent a frame of kind {header.kind} that nobody waits for")

    def received(self, connection: Connection, header: Header) -> None:
        """Handles a frame that has arrived."""
        if header.kind == Kind.PROBE:
            assert self._probe is not None
            self._probe.received(connection)
            return
        with self._changed:
            self._welcomed_by.add(header.rank)
            self._changed.notify_all()

    def _wait_for_welcome(self) -> None:
        deadline = time.monotonic() + _WELCOME_S
        servers = self._roster.servers
        with self._changed:
            while len(self._welcomed_by) < len(servers):
                self._check()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    silent = next(s for s in range(len(servers)) if s not in self._welcomed_by)
                    host, port = servers[silent]
                    raise self._blame(
                        silent,
                        f"it did not answer worker {self._roster.rank} at {host}:{port} within "
                        f"{_WELCOME_S:g} s",
                        "Does its process still run, and is the address its own? DMLC_INTERFACE or "
                        "DMLC_NODE_HOST, set for the server, choose another.",
                    )
                self._changed.wait(left_s)

    def _blame(self, server: int, reason: str, hint: str) -> P3Error:
        """Tells all processes why a server can't be reached; returns it as an error."""
        failure = Failure(reason, "server", server, hint=hint)
        self._control.send(ReportFailure(failure))
        return failure.to_error()

    def _measured_slice_size(self) -> int:
        self._probe = Probe(self._roster.rank, self._servers, self._probed)
        self._loop.call_soon(self._probe.begin)
        with self._changed:
            while self._rate_bytes_s is None:
                self._check()
                self._changed.wait()
        answer = self._control.request(
            Measured(self._rate_bytes_s), SliceSize, "all workers to measure the network"
        )
        _log.info(
            "slices have %d elements: %.0f MB/s leave this worker",
            answer.slice_size, self._rate_bytes_s / 1e6,
        )  # fmt: skip
        return int(answer.slice_size)

    def _probed(self, rate_bytes_s: float) -> None:
        with self._changed:
            self._rate_bytes_s = rate_bytes_s
            self._changed.notify_all()
