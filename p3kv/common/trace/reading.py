"""Reads what a `Tracer` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import msgspec

from p3kv.common.trace.records import (
    CLOCK,
    FORMAT,
    KEY,
    PROCESS,
    ClockSample,
    KeyName,
    Process,
    Span,
)
from p3kv.errors import TraceError


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
