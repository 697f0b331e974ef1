"""For how long servers have worked, by what the values say that they send."""

from __future__ import annotations

from bisect import bisect_right
from typing import Dict, List

import numpy as np

from p3kv.wire.header import passed_s


class ServerWork:
    """Each server's work until now, as it was when its values arrived. Belongs to the worker's
    thread."""

    def __init__(self) -> None:
        self._at_s: Dict[int, List[float]] = {}
        self._worked_s: Dict[int, List[float]] = {}
        """By server, what its values have said, and when; numbers only grow."""
        self._last_us: Dict[int, int] = {}

    def note(self, server: int, at_s: float, worked_us: int) -> None:
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

    def total_s(self, server: int) -> float:
        """For how long a server has worked since its first value; from any thread."""
        worked_s = self._worked_s.get(server)
        return worked_s[-1] if worked_s else 0.0

    def forget(self, before_s: float) -> None:
        """Forgets what nobody asks for who asks for times after `before_s`."""
        for server, at_s in self._at_s.items():
            old = max(0, bisect_right(at_s, before_s) - 1)
            del at_s[:old], self._worked_s[server][:old]
