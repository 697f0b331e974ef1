"""What a process did and when: counters always, spans when a trace is asked for.

A trace is Chrome's trace event format, one file for each process, readable by Perfetto and
`chrome://tracing`: a JSON array that is written as it grows. If a process was killed, the end of
its file is missing, and readers read the rest. Times are those of the monotonic clock, which
processes on one host share.
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
from typing import Any, Deque, Dict, List, Optional, Tuple

import msgspec

now_ns = time.monotonic_ns

MAX_TRACE_BYTES = 256 << 20
"""Largest file: nobody looks at more, and a job may train for days."""
_EVENTS_TOGETHER = 500
"""Events that are written together, and lost when a process is killed."""

_log = logging.getLogger(__name__)
_to_json = msgspec.json.Encoder().encode


class Tracer:
    """Writes spans to `<folder>/<process>.json`; does nothing without a folder.

    What goes wrong with the file ends the trace with a warning, and nothing else. `span` and
    `instant` may be called from any thread.
    """

    def __init__(self, folder: Optional[str], process: str) -> None:
        self.enabled = False
        self._process = process
        self._events: Deque[Tuple[str, str, int, int, Dict[str, Any]]] = deque()
        self._writing = threading.Lock()
        self._file: Optional[FileIO] = None
        self._size_bytes = 0
        self._pid = os.getpid()
        if folder is not None:
            self._path = Path(folder) / f"{process.replace(' ', '-')}.json"
            self._open()

    def span(self, category: str, name: str, start_ns: int, end_ns: int, **details: Any) -> None:
        """Records that `name` took from `start_ns` to `end_ns`."""
        if self.enabled:
            self._events.append((category, name, start_ns, end_ns, details))
            if len(self._events) >= _EVENTS_TOGETHER:
                self._write_events()

    def instant(self, category: str, name: str, **details: Any) -> None:
        """Records that `name` happened now."""
        if self.enabled:
            at_ns = now_ns()
            self._events.append((category, name, at_ns, at_ns, details))
            if len(self._events) >= _EVENTS_TOGETHER:
                self._write_events()

    def close(self) -> None:
        """Writes what is left; nothing is recorded any more. May be called twice."""
        self._write_events()
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
        self._write(b"[")

    def _write_events(self) -> None:
        with self._writing:
            # What other threads add meanwhile comes the next time.
            events = [self._events.popleft() for _ in range(len(self._events))]
            if not events or not self.enabled:
                return
            separator = b"\n" if self._size_bytes == len(b"[") else b",\n"
            text = separator + b",\n".join(self._line(*event) for event in events)
            if self._size_bytes + len(text) <= MAX_TRACE_BYTES:
                self._write(text)
                return
            _log.warning(
                "the trace %s has %d MB, and gets no more: nothing is recorded from now on",
                self._path, self._size_bytes >> 20,
            )  # fmt: skip
            self._end()

    def _line(
        self, category: str, name: str, start_ns: int, end_ns: int, details: Dict[str, Any]
    ) -> bytes:
        return _to_json(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": start_ns / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "pid": self._process,
                "tid": category,
                "args": details,
            }
        )

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
        self._close_file()

    def _end(self) -> None:
        self._write(b"\n]\n")
        self._close_file()

    def _close_file(self) -> None:
        self.enabled = False
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # nothing is left to be written
                file.close()


def read_trace(path: Path) -> List[Dict[str, Any]]:
    """The events of a trace, also of one whose end is missing."""
    start, *lines = path.read_bytes().split(b"\n")
    assert start == b"[", f"{path} is no trace"
    events = []
    for line in lines:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # the end, whole or cut
            events.append(msgspec.json.decode(line.rstrip(b",")))
    return events
