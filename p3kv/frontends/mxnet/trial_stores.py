"""The stores that `kvstore='p3'` gives in a trial: p3kv's, MXNet's own, or none."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import os
import sys
import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.base import _LIB, KVStoreHandle, check_call
from mxnet.kvstore import KVStore, KVStoreBase
from mxnet.ndarray import NDArray

from p3kv import config
from p3kv.config import Launch
from p3kv.config.trials import ALONE, NATIVE, Trial
from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import engine
from p3kv.frontends.mxnet.arrays import DENSE, by_key, listed
from p3kv.frontends.mxnet.store import P3
from p3kv.store.trial_clock import TrialClock, check_rule_of_trial
from p3kv.wire.messages import Key
from p3kv.worker.measures import nothing_measured

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


_COMPRESSION = "2bit"
"""The only one that MXNet has."""
_DEFAULTS = config.Settings()
_END_S = 120.0
"""A slow worker may be a step behind the others; steps take less."""
_FAILED = 1


class Clocked(KVStoreBase):
    """Times the steps that are pushed. A base of stores: their own base comes after this one."""

    clock: EngineClock

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Pushes gradients."""
        self.clock.note_push(self, *_first(key, value))
        super().push(key, value, priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Pushes gradients and receives the result into `out` (by default `value`)."""
        self.clock.note_push(self, *_first(key, value))
        super().pushpull(key, value, out, priority)


class ClockedP3(Clocked, P3):
    """p3kv's store."""

    def __init__(self, clock: EngineClock) -> None:
        self.clock = clock
        super().__init__()

    def push_no_gradient(self, key: Key, out: Any = None, priority: int = 0) -> Callable[[], bool]:
        """Says that this worker has no gradient of a key: its step counts all the same."""
        self.clock.note_push(self, key, [])
        return super().push_no_gradient(key, out, priority)


class Other(Clocked, KVStore):
    """Another store than p3kv's, with which a script for p3kv's runs all the same. What the other
    store can't do is left out, and `clock` takes note of it."""

    forward_order: Sequence[Key] = ()
    resumed_steps = 0
    max_norm: Optional[float] = None
    compression_params: Optional[Mapping[str, Any]] = None

    def __init__(self, clock: EngineClock, type_: str) -> None:
        self.clock = clock
        self._freed = False
        handle = KVStoreHandle()
        check_call(_LIB.MXKVStoreCreate(type_.encode(), ctypes.byref(handle)))
        super().__init__(handle)

    def __del__(self) -> None:
        self.free()

    @property
    def local_rank(self) -> int:
        """Rank among the host's workers, as in the job."""
        return _launch().local_rank

    @property
    def local_size(self) -> int:
        """Number of the host's workers, as in the job."""
        return _launch().local_size

    def free(self) -> None:
        """Leaves the job; may be called twice."""
        if not self._freed:
            self._freed = True
            check_call(_LIB.MXKVStoreFree(self.handle))

    def init(self, key: Any, value: Any) -> None:
        """Declares keys."""
        for one in key if isinstance(key, (list, tuple)) else [key]:
            self.clock.note_key(one)
        super().init(key, value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Declares keys and gives worker rank 0's `value` to `out`."""
        for one in key if isinstance(key, (list, tuple)) else [key]:
            self.clock.note_key(one)
        super().broadcast(key, value, out, priority)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Has gradients travel by MXNet's codec."""
        self.compression_params = compression_params
        kind = compression_params.get("type")
        if kind == _COMPRESSION:
            super().set_gradient_compression(compression_params)
        else:
            self._note_codec(kind)

    def _note_codec(self, codec: Any) -> None:
        self.clock.note(f"dist_sync has no codec '{codec}' and sends arrays as they are")

    def clip_global_norm(self, max_norm: Optional[float]) -> None:
        """Leaves gradients as they are."""
        self.max_norm = max_norm
        self.clock.note(
            "dist_sync does not clip by the global norm (kv.clip_global_norm): a script that does "
            "it on the workers takes longer than is shown here"
        )

    def global_norm(self) -> float:
        """Not known."""
        return math.nan

    def synchronize(self) -> None:
        """Does nothing: values are always exact."""

    def exchange(self) -> None:
        """Does nothing: all workers have the same weights."""

    def stats(self) -> Dict[str, Any]:
        """Zeros, as without a job."""
        return nothing_measured()

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Writes nothing."""
        self.clock.note("dist_sync can't save optimizer states")

    def load_optimizer_states(self, fname: str) -> None:
        """Reads nothing."""
        self.clock.note("dist_sync can't load optimizer states")


class Native(Other):
    """MXNet's own synchronous store, with MXNet's servers."""

    def __init__(self, clock: EngineClock) -> None:
        if clock.stores:
            raise NotSupportedError(
                "the script has several stores, and MXNet's dist_sync allows one: its servers "
                "would take the keys of all for the same. So there is nothing to compare with"
            )
        clock.stores += 1
        super().__init__(clock, NATIVE_TYPE)
        settings = config.current()
        for codec in _codecs(settings):
            self._note_codec(codec)
        if settings.encrypt:
            clock.note("dist_sync does not encrypt what it sends")
        # Here and not when the interpreter removes its modules: some of MXNet's would be missing.
        atexit.register(self.free)

    def free(self) -> None:
        """Leaves the job when all workers do; where they do not, MXNet waits for ever."""
        if getattr(sys, "last_value", None) is not None:
            _end_now()  # the script has failed: the others can't end as they should
        impatience = threading.Timer(_END_S, _end_now)
        impatience.daemon = True
        impatience.start()
        super().free()
        impatience.cancel()


class Unconnected(Other):
    """No store: nothing is sent, and weights stay as they are. Times when gradients are ready."""

    def __init__(self, clock: EngineClock, rank: int, num_workers: int) -> None:
        super().__init__(clock, "local")
        if _codecs(config.current()):
            clock.sends_less()
        self._place = rank, num_workers
        self._pushed_keys: Dict[Key, None] = {}

    @property
    def type(self) -> str:
        """Type of the store, as with servers."""
        return NATIVE_TYPE

    @property
    def rank(self) -> int:
        """Rank of this worker, as in the job."""
        return self._place[0]

    @property
    def num_workers(self) -> int:
        """Number of workers, as in the job."""
        return self._place[1]

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Takes the times."""
        self.clock.note_push(self, *_first(key, value))
        for one, gradients in by_key(key, value):
            self._pushed_keys.setdefault(one)
            if gradients[0].stype != DENSE:
                self.clock.sends_less()
            self.clock.times_layer(one, gradients)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Takes the times."""
        self.push(key, value, priority)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Gives initial values. A copy of a weight that nobody has updated would cost time."""
        for one, outs in by_key(key, out):
            if one not in self._pushed_keys:
                super().pull(one, outs, priority, ignore_sparse)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Nothing travels."""
        self.compression_params = compression_params
        self.clock.sends_less()

    def clip_global_norm(self, max_norm: Optional[float]) -> None:
        """Nothing is clipped."""
        self.max_norm = max_norm


def _codecs(settings: config.Settings) -> List[str]:
    """The codecs that settings choose, where they are not what is there without any."""
    chosen = {settings.gradient_codec, settings.value_codec}
    return sorted(chosen - {_DEFAULTS.gradient_codec, _DEFAULTS.value_codec})


def _end_now() -> None:
    sys.stdout.flush()
    os._exit(_FAILED)


def store(trial: Trial, consistency: Optional[str]) -> KVStoreBase:
    """A new store of this process; `consistency` as in `P3`. Raises NotSupportedError for one that
    can't be compared."""
    check_rule_of_trial(consistency)
    if trial.store == NATIVE:
        return Native(_clock(trial))
    if trial.store != ALONE:
        return ClockedP3(_clock(trial))
    launch = _launch()
    return Unconnected(_clock(trial), launch.rank or 0, launch.num_workers)


@functools.lru_cache(maxsize=None)
def _launch() -> Launch:
    launch = Launch.from_environment()
    assert launch is not None
    return launch


@functools.lru_cache(maxsize=None)
def _clock(trial: Trial) -> EngineClock:
    """The clock of this process, whatever the number of its stores."""
    return EngineClock(trial)


def _first(key: Any, value: Any) -> Any:
    """The first key of a push, and its gradients."""
    if isinstance(key, (list, tuple)):
        return key[0], listed(value[0])
    return key, listed(value)
