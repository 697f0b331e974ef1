"""Traces: what processes record of their work and when, written and read.

Each line of a file is a JSON array, a record's fields in their order.
Times are in nanoseconds of the process's monotonic clock, which other hosts do not share:
`ClockSample` tells how far it is from the scheduler's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Tuple, Union

import msgspec

from p3kv.errors import TraceError

FORMAT = 1
"""Version of the files; to be raised when a record changes."""
UNKNOWN = -1
"""A number that a span does not have."""

FORWARD_BEGIN = "forward begin"
"""A worker's script has begun a forward pass, where its front end knows."""
FORWARD_END = "forward end"
"""A worker's forward pass has computed the loss."""
READY = "ready"
"""The gradient of a key is computed, on a worker."""
SEND = "send"
"""A slice on its way out: since when it is queued, when its first byte was handed to the link, and
when its last. On a worker a gradient, on a server a value."""
RECEIVE = "receive"
"""A slice on its way in, from the end of its header to its last byte."""
SUM = "sum"
"""A server adds a slice to the sum of its round. Of a key of rows also the update."""
UPDATE = "update"
"""A server ends a slice's round: the sum becomes the new value."""
APPLIED = "applied"
"""All of a key's new value is in the worker's array, and the forward pass may use it."""


class Process(NamedTuple):
    """The first record of a file: whose it is."""

    name: str
    """Such as "worker 0"."""
    host: str
    pid: int
    format: int = FORMAT


class KeyName(NamedTuple):
    """Key, name and size that belong to a key's id."""

    key_id: int
    key: Union[int, str]
    """Key as the script knows it."""
    name: Optional[str]
    """The parameter's name, if it is known."""
    size_bytes: int


class ClockSample(NamedTuple):
    """How far the scheduler's clock was ahead of this process's at a time."""

    at_ns: int
    offset_ns: int
    """At most half of `round_trip_ns` wrong."""
    round_trip_ns: int


class Span(NamedTuple):
    """Operation on a slice, or a whole key, from `start_ns` to `end_ns`. `since_ns` is when it
    could have begun. Numbers that it does not have are UNKNOWN."""

    kind: str
    key_id: int
    since_ns: int
    start_ns: int
    end_ns: int
    peer: int = UNKNOWN
    """The rank of the server, on a worker; that of the worker, on a server."""
    round: int = UNKNOWN
    step: int = UNKNOWN
    slice: int = UNKNOWN
    priority: int = 0
    """Priority as on the wire: larger goes first."""
    size_bytes: int = 0


Record = Union[Process, KeyName, ClockSample, Span]
PROCESS, KEY, CLOCK = "process", "key", "clock"
"""Beginnings of the other records' lines."""


now_ns = time.monotonic_ns

SUFFIX = ".jsonl"
MAX_TRACE_BYTES = 64 << 20
"""Largest file, some 700,000 spans: nobody looks at more, and a job may train for days."""
_SPANS_TOGETHER = 500
"""Spans that are written together, and lost when a process is killed."""

_log = logging.getLogger(__name__)
_to_lines = msgspec.json.Encoder().encode_lines


class Tracer:
    """Writes records to `<folder>/<process>.jsonl`, a line each; does nothing without a folder.

    What goes wrong with the file ends the trace with a warning, and nothing else. All methods may
    be called from any thread. A caller looks at `enabled` first: making a record costs time.
    """

    def __init__(self, folder: Optional[str], process: str, host: str = "") -> None:
        """`process` is such as "worker 0"; `host` is its host, for people."""
        self.enabled = False
        self._records: Deque[Tuple[Any, ...]] = deque()
        self._writing = threading.Lock()
        self._file: Optional[FileIO] = None
        self._size_bytes = 0
        self._pid = os.getpid()
        if folder is not None:
            self._path = Path(folder) / f"{process.replace(' ', '-')}{SUFFIX}"
            self._open()
            self._records.append((PROCESS, *Process(process, host, self._pid)))
            self._write_records()

    def span(self, span: Span) -> None:
        """Records what was done."""
        if self.enabled:
            self._records.append(span)
            if len(self._records) >= _SPANS_TOGETHER:
                self._write_records()

    def name_key(self, name: KeyName) -> None:
        """Records what a key is."""
        if self.enabled:
            self._records.append((KEY, *name))

    def clock(self, sample: ClockSample) -> None:
        """Records how far the scheduler's clock is ahead."""
        if self.enabled:
            self._records.append((CLOCK, *sample))

    def close(self) -> None:
        """Writes what is left; nothing is recorded any more. May be called twice."""
        self._write_records()
        self._end()

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer of its own: what can't be written is known at once.
            self._file = FileIO(str(self._path), "w")
        except OSError as error:
            self._give_up(error)
            return
        self.enabled = True

    def _write_records(self) -> None:
        with self._writing:
            # What other threads add meanwhile comes the next time.
            records = [self._records.popleft() for _ in range(len(self._records))]
            if not records or not self.enabled:
                return
            lines = _to_lines(records)
            if self._size_bytes + len(lines) <= MAX_TRACE_BYTES:
                self._write(lines)
                return
            _log.warning(
                "the trace %s has %d MB, and gets no more: nothing is recorded from now on",
                self._path, self._size_bytes >> 20,
            )  # fmt: skip
            self._end()

    def _write(self, text: bytes) -> None:
        if self._file is None or os.getpid() != self._pid:  # a forked child's is its parent's
            return
        left = memoryview(text)
        try:
            while left:
                count = self._file.write(left) or 0
                self._size_bytes += count
                left = left[count:]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "the trace %s can't be written: %s. Nothing is recorded from now on; P3KV_TRACE must "
            "be a folder with room to which this process may write.",
            self._path, error.strerror or error,
        )  # fmt: skip
        self._end()

    def _end(self) -> None:
        self.enabled = False
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # nothing is left to be written
                file.close()


class Trace(NamedTuple):
    """Records of one process."""

    process: Process
    spans: List[Span]
    keys: Dict[int, KeyName]
    """By id; only in the traces of workers."""
    clock: List[ClockSample]


_decode = msgspec.json.Decoder().decode


def read_trace(path: Path) -> Trace:
    """The trace in a file, also in one whose end is missing. Raises TraceError, OSError."""
    process: Optional[Process] = None
    spans: List[Span] = []
    keys: Dict[int, KeyName] = {}
    clock: List[ClockSample] = []
    lines = path.read_bytes().split(b"\n")
    # The last line is empty, or was cut when the process was killed.
    for number, line in enumerate(lines[:-1], 1):
        try:
            kind, *fields = _decode(line)
            if number == 1:
                process = _process(kind, fields)
            elif kind == KEY:
                name = KeyName(*fields)
                keys[name.key_id] = name
            elif kind == CLOCK:
                clock.append(ClockSample(*fields))
            else:
                spans.append(Span(kind, *fields))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise TraceError(f"{path} is no trace of p3kv's: line {number} is {line[:80]!r}") from (
                error
            )
    if process is None:
        raise TraceError(f"{path} is no trace of p3kv's: it has no line")
    return Trace(process, spans, keys, clock)


def _process(kind: Any, fields: List[Any]) -> Process:
    process = Process(*fields)
    if kind != PROCESS or process.format != FORMAT:
        raise ValueError(f"this version reads traces of format {FORMAT}")
    return process
