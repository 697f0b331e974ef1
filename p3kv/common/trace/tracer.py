"""Records what a process does, and writes it to a file."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Deque, Optional, Tuple

import msgspec

from p3kv.common.trace.records import CLOCK, KEY, PROCESS, ClockSample, KeyName, Process, Span

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
