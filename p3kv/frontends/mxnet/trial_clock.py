"""Counts and times the steps of a script in a trial, and ends the script after the last."""

from __future__ import annotations

import atexit
import math
import statistics
import sys
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.config.trial import NATIVE, LayerReady, Report, Trial, tell
from p3kv.frontends.mxnet import engine
from p3kv.wire.messages import Key
from p3kv.worker import this_process

_STEP, _LAYER = b"p3kv_trial_step", b"p3kv_trial_layer"
"""Names of operations in MXNet's profiler."""


class TrialClock:
    """Times steps by when one and the same gradient is ready in each, without waiting for it.

    A step begins when the key is pushed that was pushed first of all: that is the first one of each
    step of gluon's Trainer and of Module. Of several stores the first one counts. When the step
    after the last begins, the script ends as by `sys.exit(0)`, on all workers before the same push.
    To be used from the script's thread.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.stores = 0
        """How many stores of MXNet's there are."""
        self._counted: Optional[Tuple[Any, Key]] = None
        """The store whose steps count, and its key that is pushed first."""
        self._steps = 0
        self._times_s: List[float] = []
        self._ready_s: Dict[Key, List[Tuple[int, float]]] = {}
        """By key: in which steps its gradient was ready, and when."""
        self._numbers: Dict[Key, int] = {}
        self._size_bytes: Dict[Key, int] = {}
        self._sends_all = True
        self._notes: Dict[str, None] = {}
        self._has_told = False
        atexit.register(self._tell_at_exit)

    def note(self, text: str) -> None:
        """Takes note of what makes this trial differ from the others."""
        self._notes.setdefault(text)

    def sends_less(self) -> None:
        """Takes note that a step does not send every element."""
        self._sends_all = False

    def note_key(self, key: Key) -> None:
        """Takes note of a key. MXNet's servers know texts by the order of their declaration."""
        self._numbers[key] = key if isinstance(key, int) else len(self._numbers)

    def note_push(self, store: Any, key: Key, gradients: Sequence[NDArray]) -> None:
        """Takes note of a push, before anything else happens to it; without gradients, its time is
        now."""
        if self._counted is None:
            self._counted = store, key
        if self._counted[0] is not store or self._counted[1] != key:
            return
        self._steps += 1

        def ready(operation: engine.Operation) -> None:
            self._times_s.append(time.monotonic())
            operation.complete()

        engine.push(ready, gradients[:1], [], _STEP)
        if self._steps >= self._trial.last_step:
            mx.nd.waitall()
            self._tell()
            sys.exit(0)

    def times_layer(self, key: Key, gradients: Sequence[NDArray]) -> None:
        """Has the time noted at which a key's gradient is ready in this step."""
        first, step = gradients[0], self._steps
        self._size_bytes[key] = math.prod(first.shape) * first.dtype().itemsize
        times = self._ready_s.setdefault(key, [])

        def ready(operation: engine.Operation) -> None:
            times.append((step, time.monotonic()))
            operation.complete()

        engine.push(ready, gradients, [], _LAYER)

    def _tell_at_exit(self) -> None:
        if self._trial.store != NATIVE:  # which would wait for workers that have failed
            mx.nd.waitall()
        self._tell()

    def _tell(self) -> None:
        if self._has_told:
            return
        self._has_told = True
        begin_s = self._times_s[0] if self._times_s else 0.0
        times_s = tuple(round(at_s - begin_s, 6) for at_s in self._times_s)
        notes = tuple(self._notes)
        tell(Report(times_s, self._layers(), _link_bytes_s(), self._sends_all, notes))

    def _layers(self) -> Tuple[LayerReady, ...]:
        begins_s: Dict[int, float] = {}
        for times in self._ready_s.values():
            for step, at_s in times:
                begins_s[step] = min(begins_s.get(step, at_s), at_s)
        layers = [
            LayerReady(
                self._numbers.get(key, 0),
                self._size_bytes[key],
                round(statistics.median(at_s - begins_s[step] for step, at_s in times), 6),
            )
            for key, times in self._ready_s.items()
            if times
        ]
        return tuple(sorted(layers, key=lambda layer: layer.ready_s))


def _link_bytes_s() -> Optional[float]:
    """Rate of a host's link in each direction, where p3kv has measured it."""
    if not this_process.is_worker() or not this_process.worker().started:
        return None
    verdict = this_process.worker().stats()["verdict"]
    return None if verdict is None else verdict["link_bytes_s"]
