"""Writes values into their parameters before the script comes to read them."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Iterable, List, Optional, Protocol
from weakref import ReferenceType, finalize, ref

from p3kv.errors import P3Error
from p3kv.worker.worker import Worker

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
    alone, and not for its host's memory, too. All optimizers of the process have it.

    All may be called from any thread.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Optional[Writable]] = SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Begins to write, if it has not begun; before, whoever reads a parameter does it."""
        with self._starting:
            if self._thread is None:
                name = "p3kv early writes"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def soon(self, one: Writable, whatever_size: bool = False) -> None:
        """Has a value written that is there, where that is worth it."""
        if one.size_bytes >= _WORTH_BYTES or whatever_size:
            self._queue.put(one)

    def close(self) -> None:
        """Ends the thread; whoever reads a parameter then writes its value. May be called twice."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            one = self._queue.get()
            if one is None:
                return
            with suppress(P3Error):  # the script is told when it reads the parameter
                one.take_if_there()
            del one  # or this thread would keep it, and its parameter, until the next one comes


EARLY = EarlyWrites()
"""The process's."""


class Takes(Protocol):
    """A tensor whose value may be under way."""

    def take(self) -> None:
        """Waits for the value, and has the tensor have it."""


class _Left:
    """Tensors that nobody exchanges any more. Those whose values have come are what they were."""

    size_bytes = 0

    def __init__(self, lates: List[Takes]) -> None:
        self._lates = lates

    def take_if_there(self) -> None:
        for late in self._lates:
            late.take()


def forget_with(owner: object, worker: Worker, store: int, lates: Iterable[Takes]) -> None:
    """Has a store be forgotten when nobody has its owner any more. Tensors may be there still, and
    get the values that are under way then."""
    held = [ref(late) for late in lates]
    finalize(owner, _forget, worker, store, held).atexit = False


def _forget(worker: Worker, store: int, held: List[ReferenceType[Takes]]) -> None:
    """In whatever thread: no lock may be taken here."""
    lates = [late for late in (one() for one in held) if late is not None]
    worker.forget_store(store, partial(EARLY.soon, _Left(lates), whatever_size=True))
