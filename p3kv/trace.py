"""What a process did and when: counters always, spans when a trace is asked for.

A trace is Chrome's trace event format, one file for each process, readable by Perfetto and
`chrome://tracing`. Times are the host's monotonic clock, which processes on one host share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

now_ns = time.monotonic_ns


class Tracer:
    """Collects spans in memory; does nothing when it has no folder to write to.

    `span` and `instant` may be called from any thread.
    """

    def __init__(self, folder: Optional[str], process: str) -> None:
        self.enabled = folder is not None
        self._folder = folder
        self._process = process
        self._events: List[Tuple[str, str, int, int, Dict[str, Any]]] = []

    def span(self, category: str, name: str, start_ns: int, end_ns: int, **details: Any) -> None:
        """Records that `name` took from `start_ns` to `end_ns`."""
        if self.enabled:
            self._events.append((category, name, start_ns, end_ns, details))

    def instant(self, category: str, name: str, **details: Any) -> None:
        """Records that `name` happened now."""
        if self.enabled:
            at_ns = now_ns()
            self._events.append((category, name, at_ns, at_ns, details))

    def write(self) -> Optional[Path]:
        """Writes `<folder>/<process>.json` whole or not at all; returns where."""
        if self._folder is None:
            return None
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._process.replace(' ', '-')}.json"
        events = [
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
            for category, name, start_ns, end_ns, details in list(self._events)
        ]
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps({"traceEvents": events}))
        unfinished.replace(path)
        return path
