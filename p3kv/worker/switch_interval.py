"""Python's switch interval while the store exists: how long its thread waits for the GIL."""

from __future__ import annotations

import math
import sys
from typing import Optional


class SwitchInterval:
    """Lowers this process's switch interval, and restores it.

    With Python's own 5 ms, a script that is busy in Python leaves links idle most of the time: the
    worker's thread waits that long for the GIL at every event.
    """

    def __init__(self) -> None:
        self._lowered_to_s = 0.0
        self._before_s: Optional[float] = None

    def lower(self, wish_s: float) -> None:
        """Sets the switch interval to `wish_s` seconds if it is longer; 0 leaves it alone."""
        before_s = sys.getswitchinterval()
        if 0 < wish_s < before_s:
            sys.setswitchinterval(wish_s)
            self._lowered_to_s, self._before_s = wish_s, before_s

    def restore(self) -> None:
        """Undoes `lower`, unless other code has set another interval meanwhile."""
        is_ours = math.isclose(sys.getswitchinterval(), self._lowered_to_s, abs_tol=1e-6)
        if self._before_s is not None and is_ours:
            sys.setswitchinterval(self._before_s)
            self._before_s = None
