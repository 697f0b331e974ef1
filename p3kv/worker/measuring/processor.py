"""For how long this process could go on and had no processor."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Dict, List

from p3kv.worker.measuring.step_parts import Delayed

_LOOK_EVERY_S = 0.25
"""A look reads a file for each thread: a millisecond where there are many."""
_TASKS = "/proc/self/task"

now_s = time.monotonic


class ProcessorDelay:
    """The shares of time in which threads of this process waited for a processor.

    The kernel counts for each thread how long it was ready to run and did not (`schedstat`). Of
    threads that compute together, all are delayed about as long as the one that is delayed most.
    """

    def __init__(self) -> None:
        """To be made in the script's thread."""
        self._script = str(threading.get_native_id())
        self._looked_s = now_s()
        self._delays_ns = _delays_ns()
        self._found = Delayed()

    def delayed(self) -> Delayed:
        """Shares of delay since the last look, which is a quarter of a second ago at least; to be
        called from the thread that sends and receives."""
        now = now_s()
        elapsed_s = now - self._looked_s
        if elapsed_s >= _LOOK_EVERY_S:
            before_ns, self._delays_ns, self._looked_s = self._delays_ns, _delays_ns(), now
            shares = {
                thread: min(1.0, max(0.0, delay_ns - before_ns.get(thread, 0)) / 1e9 / elapsed_s)
                for thread, delay_ns in self._delays_ns.items()
            }
            exchange = shares.pop(str(threading.get_native_id()), 0.0)
            passes: List[float] = list(shares.values())
            self._found = Delayed(max(passes, default=0.0), shares.get(self._script, 0.0), exchange)
        return self._found


def _delays_ns() -> Dict[str, int]:
    """By thread; none where the kernel does not count."""
    delays: Dict[str, int] = {}
    with suppress(OSError):
        for thread in os.listdir(_TASKS):
            with suppress(OSError), open(f"{_TASKS}/{thread}/schedstat") as file:
                delays[thread] = int(file.read().split()[1])
    return delays
