"""Writes values into their parameters before the script comes to read them."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Optional, Protocol

from p3kv.errors import P3Error

_WORTH_BYTES = 1 << 16
"""To wake a thread takes longer than to copy less."""


class Writable(Protocol):
    """What a value is under way to."""

    @property
    def size_bytes(self) -> int: ...

    def take_if_there(self) -> None:
        """Writes the value, if it is there and is to be written."""


class EarlyWrites:
    """A thread that copies while the script computes: a forward pass then waits for the network
    alone, and not for its host's memory, too.

    `soon` may be called from any thread.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Optional[Writable]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="p3kv early writes", daemon=True)

    def start(self) -> None:
        """Begins to write; before, whoever reads a parameter does it."""
        self._thread.start()

    def soon(self, one: Writable) -> None:
        """Has a value written that is there, where that is worth it."""
        if one.size_bytes >= _WORTH_BYTES:
            self._queue.put(one)

    def close(self) -> None:
        """Ends the thread; whoever reads a parameter then writes its value. May be called twice."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            one = self._queue.get()
            if one is None:
                return
            with suppress(P3Error):  # the script is told when it reads the parameter
                one.take_if_there()
