"""Where this worker's script is, and since when it waits."""

from __future__ import annotations

import linecache
import math
import os
import sys
import sysconfig
import threading
import time
from types import FrameType
from typing import Collection, List, Mapping, Optional, Sequence, Tuple

from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import MAX_AWAITED, MAX_PLACE_CHARS, Whereabouts
from p3kv.worker.exchange import Exchange
from p3kv.worker.transfers import WorkerKey

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Script:
    """The thread that runs the script. `begin_wait` and `end_wait` belong to it, all else to any. A
    wait is one for values that come from servers, perhaps among other things."""

    def __init__(self, libraries: Collection[str]) -> None:
        """`libraries` are the packages whose lines are not the script's."""
        self._libraries = libraries
        self._thread = threading.get_ident()
        self._waits = 0
        self._since_s: Optional[float] = None
        self._told_s = 0.0
        self.waited_s = 0.0
        """How long it has waited so far."""
        self.has_ended = False
        """Whether it makes no more calls: the process is about to leave the job."""

    @property
    def is_current(self) -> bool:
        """Whether the caller's thread is that of the script."""
        return threading.get_ident() == self._thread

    def begin_wait(self) -> None:
        """The script begins to wait."""
        self._waits += 1
        self._told_s = 0.0
        self._since_s = time.monotonic()

    def end_wait(self) -> None:
        """The script goes on."""
        if self._since_s is not None:
            self.waited_s += time.monotonic() - self._since_s
        self._since_s = None

    def has_waited_for(self, first_s: float, now_s: float) -> bool:
        """Whether to tell of a wait: of `first_s`, or twice as long as when it was told last."""
        since_s = self._since_s
        if since_s is None or now_s - since_s < max(first_s, 2 * self._told_s):
            return False
        self._told_s = now_s - since_s
        return True

    def place(self) -> str:
        """File, line and text of the line at which the script is; empty where it has ended."""
        frame = None if self.has_ended else sys._current_frames().get(self._thread)
        where = "an unknown line"
        while frame is not None:
            if not self._is_library(frame):
                name, line = frame.f_code.co_filename, frame.f_lineno
                where = f"{os.path.basename(name)}, line {line}"
                text = linecache.getline(name, line, frame.f_globals).strip()
                where += f": {text}" if text else ""
                break
            frame = frame.f_back
        return "" if self.has_ended else where[:MAX_PLACE_CHARS]

    def _is_library(self, frame: FrameType) -> bool:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in self._libraries:
            return True
        path = frame.f_code.co_filename
        installed = any(part in path for part in _INSTALLED)
        return path.startswith(("<frozen", _STANDARD_LIBRARY)) and not installed

    def whereabouts(
        self,
        asked: Sequence[Tuple[int, int]] = (),
        keys: Optional[Mapping[int, WorkerKey]] = None,
        exchange: Optional[Exchange] = None,
    ) -> Whereabouts:
        """What to tell the scheduler, with the `asked` rounds for which the script has not pushed;
        in the worker's thread, where that runs."""
        since_s = self._since_s
        wait, waited_s = (0, 0.0) if since_s is None else (self._waits, time.monotonic() - since_s)
        awaits: List[Tuple[int, int]] = []
        called = ""
        if wait and exchange is not None:
            transfers = exchange.awaited()[:MAX_AWAITED]
            awaits = [(one.key.key_id, one.round) for one in transfers]
            if transfers:
                first = transfers[0]
                called = f"{first.key.called} in round {first.round}"
                if first.round == INITIAL_ROUND:
                    called = f"the initial value of {first.key.called}"
                called += f" and {len(transfers) - 1} more" if len(transfers) > 1 else ""
        known = keys or {}
        lacks = tuple(
            (key_id, round_)
            for key_id, round_ in asked
            if key_id not in known or known[key_id].round < round_
        )
        called = called[:MAX_PLACE_CHARS]
        return Whereabouts(self.place(), wait, waited_s, tuple(awaits), called, lacks)


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
