"""One emulated accelerator stream: operations that take a stated time and no processor.

An operation of MXNet's engine that is submitted here begins when the one before it has ended
and the engine finds its arrays ready, lasts as long as stated, and is completed then. Its end is
computed and not measured: `max(end of the one before, ready) + duration`. A thread that wakes up
late completes it late, but what follows is not pushed back, so lateness never adds up.

The order is kept here and not by an array that all operations write: through the engine, each
would learn that its arrays are ready only when the one before is completed, and the wake-up
between the two, some 0.1 ms, would add to every operation.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from typing import Deque, List, NamedTuple, Optional, Sequence

from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet import engine

_log = logging.getLogger(__name__)
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>


class Span(NamedTuple):
    """One operation of the stream, in nanoseconds of `time.monotonic_ns`.

    `start_ns` and `end_ns` are the emulated times; `late_ns` is how long after `end_ns` the
    engine was told.
    """

    layer: str
    phase: str
    iteration: int
    start_ns: int
    end_ns: int
    late_ns: int


class _Entry:
    """One submitted operation; `operation` and `ready_ns` come when the engine starts it."""

    __slots__ = ("duration_ns", "iteration", "layer", "operation", "phase", "ready_ns")

    def __init__(self, layer: str, phase: str, iteration: int, duration_ns: int) -> None:
        self.layer = layer
        self.phase = phase
        self.iteration = iteration
        self.duration_ns = duration_ns
        self.operation: Optional[engine.Operation] = None
        self.ready_ns = 0


class Stream:
    """Runs submitted operations one at a time, in the order of submission.

    It owns one thread, which sleeps but for the microseconds of a completion. Only one thread
    may use `submit` and `wait`.
    """

    def __init__(self, name: str = "accelerator") -> None:
        self.spans: List[Span] = []
        self._lock = threading.Lock()
        self._head_ready = threading.Condition(self._lock)
        self._awaited_done = threading.Condition(self._lock)
        self._queue: Deque[_Entry] = deque()
        self._busy = False
        self._submitted = 0
        self._completed = 0
        self._awaited = 0
        self._failure: Optional[BaseException] = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        layer: str,
        phase: str,
        iteration: int,
        duration_s: float,
        reads: Sequence[NDArray],
        writes: Sequence[NDArray],
    ) -> int:
        """Adds an operation and returns its number, for `wait`. Does not block."""
        entry = _Entry(layer, phase, iteration, round(duration_s * 1e9))
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("the stream is closed")
            self._queue.append(entry)
            self._submitted += 1

        def start(operation: engine.Operation) -> None:
            ready_ns = time.monotonic_ns()
            with self._lock:
                entry.ready_ns = ready_ns
                entry.operation = operation
                if self._closing.is_set():
                    self._drain()
                elif entry is self._queue[0]:
                    self._head_ready.notify()

        engine.push(start, reads, writes, name=b"emulated")
        return self._submitted

    def wait(self, number: int, stall_s: float) -> None:
        """Waits until operation `number` is completed.

        Raises `TimeoutError` when nothing was completed for `stall_s` seconds because an
        operation waits for its arrays: the store has lost them, or left an error in them, for
        which the engine skips whatever reads them.
        """
        with self._lock:
            self._awaited = number
            while self._completed < number and self._failure is None:
                before = self._completed
                if self._awaited_done.wait(stall_s) or self._completed != before or self._busy:
                    continue
                head = self._queue[0]
                if head.operation is None:
                    raise TimeoutError(
                        f"the {head.phase} pass of {head.layer} in iteration {head.iteration} "
                        f"has waited more than {stall_s} s for its arrays"
                    )
            if self._failure is not None:
                raise RuntimeError("the emulated accelerator failed") from self._failure

    def close(self) -> None:
        """Ends the thread; may be called twice.

        What is still to be computed takes no time any more: it is completed as soon as the
        engine finds its arrays ready, so that nothing that waits in the engine is left hanging.
        """
        with self._lock:
            self._closing.set()
            self._head_ready.notify()
        self._thread.join()
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        """Completes what the engine has started and the thread has not taken. Holds the lock."""
        for entry in self._queue:
            if entry.operation is not None:
                entry.operation.complete()
        self._queue = deque(entry for entry in self._queue if entry.operation is None)

    def _run(self) -> None:
        # The default lets the kernel add 0.05 ms to every sleep. It is per thread.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        try:
            self._run_entries()
        except BaseException as error:
            _log.exception("the emulated accelerator stops")
            with self._lock:
                self._failure = error
                self._awaited_done.notify()
            raise

    def _run_entries(self) -> None:
        end_ns = 0
        while True:
            entry = self._next()
            if entry is None:
                return
            assert entry.operation is not None
            start_ns = max(end_ns, entry.ready_ns)
            end_ns = start_ns + entry.duration_ns
            while not self._closing.is_set():
                left_ns = end_ns - time.monotonic_ns()
                if left_ns <= 0:
                    break
                self._closing.wait(left_ns / 1e9)
            late_ns = time.monotonic_ns() - end_ns
            entry.operation.complete()
            span = Span(entry.layer, entry.phase, entry.iteration, start_ns, end_ns, late_ns)
            with self._lock:
                self._busy = False
                self.spans.append(span)
                self._completed += 1
                if self._completed >= self._awaited:
                    self._awaited_done.notify()

    def _next(self) -> Optional[_Entry]:
        """Waits for the first of the queue to be ready and takes it; none when closing."""
        with self._lock:
            while not self._closing.is_set():
                if self._queue and self._queue[0].operation is not None:
                    self._busy = True
                    return self._queue.popleft()
                self._head_ready.wait()
        return None
