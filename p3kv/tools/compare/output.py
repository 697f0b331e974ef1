"""Output of a trial's processes: reports of workers, and text that is shown if one fails."""

from __future__ import annotations

import io
import threading
from collections import deque
from typing import Any, BinaryIO, Deque, List, Optional

from p3kv.config.trials import Reports

_KEPT_LINES = 40
_BETWEEN = " | "
"""Between a process's name and its line, as the launcher writes it."""


class Output:
    """Takes the lines of all processes, in any thread."""

    def __init__(self, show: Optional[BinaryIO]) -> None:
        """`show` gets all that is no report, at once; None keeps the last lines of it."""
        self.reports = Reports()
        self._show = show
        self._last: Deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()

    def stream(self) -> BinaryIO:
        """Something to write to; each needs whole lines."""
        return _Stream(self)  # type: ignore[return-value]  # a RawIOBase is all that is asked for

    @property
    def last_lines(self) -> List[str]:
        """The last lines that are no reports, unless they are shown already."""
        return list(self._last)

    def take(self, line: str) -> None:
        """Takes a line without its end."""
        name, _, text = line.partition(_BETWEEN)
        with self._lock:
            if not self.reports.take(name.strip(), text) and (text or _BETWEEN not in line):
                if self._show is None:
                    self._last.append(line)
                else:
                    self._show.write(f"{line}\n".encode())
                    self._show.flush()


class _Stream(io.RawIOBase):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        self._rest = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        *lines, self._rest = (self._rest + bytes(data)).split(b"\n")
        for line in lines:
            self._output.take(line.decode(errors="replace"))
        return len(data)
