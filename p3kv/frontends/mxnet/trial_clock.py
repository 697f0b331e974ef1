"""Times the steps of a script in a trial by MXNet's engine, and ends the script after the last."""

from __future__ import annotations

import atexit
import math
import sys
from typing import Any, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.config.trials import NATIVE, Trial
from p3kv.frontends.mxnet import engine
from p3kv.store.trial_clock import TrialClock
from p3kv.wire.messages import Key

NATIVE_TYPE = "dist_sync"
"""The type of MXNet's own synchronous store."""
_STEP, _LAYER = b"p3kv_trial_step", b"p3kv_trial_layer"
"""Names of operations in MXNet's profiler."""


class EngineClock(TrialClock):
    """Times when gradients are ready, without waiting for them.

    A step begins when the key is pushed that was pushed first of all: that is the first one of each
    step of gluon's Trainer and of Module. Of several stores the first one counts. When the step
    after the last begins, the script ends as by `sys.exit(0)`, on all workers before the same push.
    To be used from the script's thread.
    """

    front_end, native = mx.__name__, NATIVE_TYPE

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.stores = 0
        """How many stores of MXNet's there are."""
        self._counted: Optional[Tuple[Any, Key]] = None
        """The store whose steps count, and its key that is pushed first."""
        atexit.register(self._tell_at_exit)

    def note_push(self, store: Any, key: Key, gradients: Sequence[NDArray]) -> None:
        """Takes note of a push, before anything else happens to it; without gradients, its time is
        now."""
        if self._counted is None:
            self._counted = store, key
        if self._counted[0] is not store or self._counted[1] != key:
            return
        self.begin_step()

        def ready(operation: engine.Operation) -> None:
            self.step_ready()
            operation.complete()

        engine.push(ready, gradients[:1], [], _STEP)
        if self.is_over:
            mx.nd.waitall()
            self.tell()
            sys.exit(0)

    def times_layer(self, key: Key, gradients: Sequence[NDArray]) -> None:
        """Has the time noted at which a key's gradient is ready in this step."""
        first = gradients[0]
        step = self.time_layer(key, math.prod(first.shape) * first.dtype().itemsize)

        def ready(operation: engine.Operation) -> None:
            self.layer_ready(key, step)
            operation.complete()

        engine.push(ready, gradients, [], _LAYER)

    def _tell_at_exit(self) -> None:
        if self.trial.store != NATIVE:  # which would wait for workers that have failed
            mx.nd.waitall()
        self.tell()
