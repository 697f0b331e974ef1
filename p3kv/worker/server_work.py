"""For how long servers have worked, by what the values say that they send."""

from __future__ import annotations

from typing import Dict, List

import numpy as np

from p3kv.wire.header import passed_s


class ServerWork:
    """Each server's work until now, as it was when its values arrived. Belongs to the worker's
    thread."""

    def __init__(self) -> None:
        self._at_s: Dict[int, List[float]] = {}
        self._worked_s: Dict[int, List[float]] = {}
        """By server, what its values have said since `forget`, and when; numbers only grow."""
        self._last_us: Dict[int, int] = {}

    def told(self, server: int, at_s: float, worked_us: int) -> None:
        """Takes note of what a value says that has arrived at `at_s`: its server had worked for so
        long. Values that overtake each other say less than what is known."""
        before_us = self._last_us.setdefault(server, worked_us)
        worked_s = self._worked_s.setdefault(server, [])
        more_s = max(0.0, passed_s(before_us, worked_us))
        if more_s:
            self._last_us[server] = worked_us
        worked_s.append(more_s + (worked_s[-1] if worked_s else 0.0))
        self._at_s.setdefault(server, []).append(at_s)

    def between(self, server: int, begin_s: float, end_s: float) -> float:
        """For how long a server has worked between two times, taken as even between two values."""
        if server not in self._at_s:
            return 0.0
        before, after = np.interp([begin_s, end_s], self._at_s[server], self._worked_s[server])
        return float(after - before)

    def forget(self) -> None:
        """Forgets all but the newest value of each server."""
        for kept in (*self._at_s.values(), *self._worked_s.values()):
            del kept[:-1]
