"""The store that MXNet's users see."""

from __future__ import annotations

import atexit
import operator
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from p3kv import config
from p3kv.errors import KeyMismatchError, NotSupportedError
from p3kv.frontends.mxnet import engine, optimizer_settings
from p3kv.frontends.mxnet.arrays import (
    Staging,
    by_key,
    check_declared,
    check_distinct,
    check_fit,
    check_kind,
    listed,
    spread,
)
from p3kv.frontends.mxnet.forks import complete_before_forks
from p3kv.frontends.mxnet.forward_order import OrderLearner
from p3kv.frontends.mxnet.front_end import MXNet
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Key, called
from p3kv.worker import this_process
from p3kv.worker.transfers import Transfer, WorkerKey

_NAMES = {
    (True, True): b"p3kv_pushpull",
    (True, False): b"p3kv_push",
    (False, True): b"p3kv_pull",
}
"""Names of operations in MXNet's profiler, by whether they send and whether they receive."""


class P3(KVStoreBase):
    """MXNet's distributed KVStore with priority-based parameter propagation (P3, SysML'19).

    Every call returns at once: it pushes an operation into MXNet's engine. The engine starts the
    operation when the gradient is ready, and holds back what needs the weight until the new value
    has arrived. A call raises what it can't do. If the job fails later, MXNet raises the reason as
    `mxnet.base.MXNetError` to callers that wait for a weight, and every further call raises it.

    Values are dense float32 or float64 arrays; where several are given, one for each device,
    they are summed before they are sent. To be used from one thread.

    Creating it lowers Python's switch interval to 0.1 ms until the process ends, so that a script
    that is busy in Python does not delay gradients. The setting `switch_interval_s` chooses another
    interval, and 0 keeps Python's.
    """

    _instance: Optional[P3] = None

    def __init__(self) -> None:
        if P3._instance is not None:
            raise NotSupportedError(
                "this process has a p3 store already, and more than one is not built yet. Create "
                "it once with mx.kv.create('p3') and pass that object as kvstore=."
            )
        self._worker = this_process.worker()
        self._worker.start(config.settle())
        P3._instance = self
        self._staging = Staging()
        self._names: Mapping[Key, str] = {}
        self._order = OrderLearner(self._worker.publish_order)
        if self.rank != 0:
            self._order.stop()  # rank 0 decides, and all workers use its order
        self._optimizer: Optional[mx.optimizer.Optimizer] = None
        self._settings = b""
        self._updates: Dict[Key, int] = {}
        self._step = 0
        self._optimizer_since = 0
        complete_before_forks()
        atexit.register(_finish)

    # What MXNet asks about the store.

    @property
    def type(self) -> str:
        """'dist_sync_p3', whichever name it was created by: MXNet looks for 'dist' and '_sync'."""
        return "dist_sync_p3"

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0."""
        return self._worker.rank

    @property
    def num_workers(self) -> int:
        """Number of workers in the job."""
        return self._worker.num_workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store has a capability: 'optimizer', to update weights on the servers."""
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return True
        raise NotSupportedError(f"MXNet asks for '{capability}', which p3kv does not know")

    @property
    def forward_order(self) -> List[Key]:
        """Keys in the order in which the forward pass needs them, the most urgent first.

        Empty until it is learned; the same on all workers.
        """
        return self._worker.forward_order

    def stats(self) -> Dict[str, int]:
        """Counts of what this worker has done so far.

        bytes_sent, bytes_received, slices_sent, slices_received; and inversions, inversion_bytes:
        slices that left while a more urgent slice waited for a full connection.
        """
        return self._worker.stats()

    # Values.

    def name_keys(self, names: Mapping[Key, str]) -> None:
        """Sets the user's names of parameters whose keys are still to be declared."""
        self._names = {**self._names, **names}

    def init(self, key: Union[Key, Sequence[Key]], value: Any) -> None:
        """Declares keys on all workers; worker rank 0's values are the initial ones."""
        check_distinct(key)
        for one_key, (first, *_) in by_key(key, value):
            worker_key = self._declare(one_key, first)
            self._order.declared(one_key, [first])
            if self.rank == 0:
                self._push_initial(worker_key, first)

    def broadcast(
        self, key: Union[Key, Sequence[Key]], value: Any, out: Any, priority: int = 0
    ) -> None:
        """Declares keys and gives worker rank 0's `value` to `out` on all workers."""
        priority = _priority(priority)
        check_distinct(key)
        for one_key, (first, *_), targets in by_key(key, value, out):
            worker_key = self._declare(one_key, first, targets)
            self._order.declared(one_key, targets)
            if self.rank == 0:
                self._push_initial(worker_key, first)
                spread(first, targets)
            else:
                target = self._staging.target(worker_key, targets)
                self._pull(worker_key, target, priority)
                spread(target, targets)

    def pushpull(
        self, key: Union[Key, Sequence[Key]], value: Any, out: Any = None, priority: int = 0
    ) -> None:
        """Pushes gradients and receives the round's result into `out` (by default `value`):
        the updated weight if the store has an optimizer, or else the sum over the workers.

        `priority`, a whole number of 32 bits, holds until the forward order is learned; larger
        goes first.
        """
        priority = _priority(priority)
        known = self._known(key, value, value if out is None else out)
        for worker_key, sources, targets in known:
            source = self._staging.source(worker_key, sources)
            target = self._staging.target(worker_key, targets)
            round_, step = self._next_round(worker_key)
            self._begin_when_ready(worker_key, round_, step, priority, source, target)
            spread(target, targets)

    def push(self, key: Union[Key, Sequence[Key]], value: Any, priority: int = 0) -> None:
        """Pushes gradients; the result stays on the servers until `pull`."""
        priority = _priority(priority)
        for worker_key, sources in self._known(key, value):
            source = self._staging.source(worker_key, sources)
            round_, step = self._next_round(worker_key)
            self._begin_when_ready(worker_key, round_, step, priority, source, None)

    def pull(
        self,
        key: Union[Key, Sequence[Key]],
        out: Any = None,
        priority: int = 0,
        ignore_sparse: bool = True,
    ) -> None:
        """Receives values into `out`, this worker's last push included."""
        if out is None:
            raise TypeError("pull needs out=, the arrays to write into")
        priority = _priority(priority)
        for worker_key, targets in self._known(key, out):
            target = self._staging.target(worker_key, targets)
            self._pull(worker_key, target, priority)
            spread(target, targets)

    # The optimizer.

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Has the servers update weights with worker rank 0's optimizer from now on.

        It begins with fresh states and counts, also if another one was set before. Later changes
        to it, such as `trainer.set_learning_rate`, hold from the next step on.
        Raises NotSupportedError for an optimizer that can't run slice by slice.
        """
        settings = optimizer_settings.to_bytes(optimizer, self._step)
        self._optimizer = optimizer
        self._updates.clear()
        self._optimizer_since = self._step
        self._send_optimizer_settings(settings, self._step + 1)

    # What MXNet's store has and this one does not.

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Not built yet."""
        raise NotSupportedError(
            f"gradient compression ({compression_params}) is not built yet; leave "
            "compression_params out, or use kvstore='dist_sync'"
        )

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Not built yet."""
        raise NotSupportedError(
            "row_sparse_pull is not built yet; use dense parameters, or kvstore='dist_sync'"
        )

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Not built yet."""
        raise NotSupportedError(
            "optimizer states on the servers can't be saved yet; with update_on_kvstore=False "
            "they are on the workers, and trainer.save_states works"
        )

    def load_optimizer_states(self, fname: str) -> None:
        """Not built yet."""
        raise NotSupportedError(
            "optimizer states on the servers can't be loaded yet; with update_on_kvstore=False "
            "they are on the workers, and trainer.load_states works"
        )

    def _send_command_to_servers(self, head: int, body: str) -> None:
        raise NotSupportedError(f"commands to servers (head {head}) are not built yet")

    def _barrier(self) -> None:
        """Waits for all workers, as MXNet's stores do."""
        self._worker.barrier()

    # How it is done.

    def _declare(self, key: Key, value: NDArray, outs: Sequence[NDArray] = ()) -> WorkerKey:
        name = self._names.get(key)
        if key in self._worker:
            raise KeyMismatchError(
                f"{called(key, name)} was initialised before on worker {self.rank}; initialise "
                "each key once. Each Trainer counts its keys from 0: give all parameters to one "
                "Trainer"
            )
        check_kind(key, value)
        shape, dtype = tuple(value.shape), np.dtype(value.dtype).name
        # Before the key is declared to others: a refused call changes nothing.
        check_fit(key, called(key, name), shape, dtype, outs)
        return self._worker.declare(key, shape, dtype, name)

    def _known(self, keys: Any, *arrays: Any) -> List[Tuple[Any, ...]]:
        """Declared keys with lists of their arrays; raises the job's failure.

        The arrays of several keys are all checked here: a call that is refused pushes nothing.
        """
        self._worker.check()
        if not isinstance(keys, (list, tuple)):
            return [(self._worker.key(keys), *map(listed, arrays))]
        known = [(self._worker.key(key), *lists) for key, *lists in by_key(keys, *arrays)]
        for worker_key, *lists in known:
            for one in lists:
                check_declared(worker_key, one)
        return known

    def _next_round(self, worker_key: WorkerKey) -> Tuple[int, int]:
        """Counts a push: the key's round, and the step that an optimizer would count."""
        worker_key.round += 1
        updates = self._updates[worker_key.key] = self._updates.get(worker_key.key, 0) + 1
        if self._optimizer_since + updates > self._step:
            self._step += 1
            self._begin_step()
        self._worker.pushed(self._step)
        self._order.pushed(worker_key.key)
        return worker_key.round, self._step

    def _begin_step(self) -> None:
        """Once a step, before its first slice: rank 0 publishes the order and new settings."""
        self._order.begin_step(self._step)
        optimizer = self._optimizer
        if optimizer is not None:
            # Learning rate schedulers run here and use this count, which MXNet only counts where
            # it updates.
            since = self._optimizer_since
            optimizer.num_update = optimizer.begin_num_update + self._step - since
            settings = optimizer_settings.to_bytes(optimizer, since)
            if settings != self._settings:
                self._send_optimizer_settings(settings, self._step)

    def _send_optimizer_settings(self, settings: bytes, from_step: int) -> None:
        self._settings = settings
        if self.rank == 0:
            self._worker.set_optimizer(from_step, MXNet.name, settings)

    def _push_initial(self, worker_key: WorkerKey, value: NDArray) -> None:
        source = self._staging.source(worker_key, [value])
        self._begin_when_ready(worker_key, INITIAL_ROUND, self._step, 0, source, None)

    def _pull(self, worker_key: WorkerKey, target: NDArray, priority: int) -> None:
        self._begin_when_ready(worker_key, worker_key.round, self._step, priority, None, target)

    def _begin_when_ready(
        self,
        key: WorkerKey,
        round_: int,
        step: int,
        priority: int,
        source: Optional[NDArray],
        target: Optional[NDArray],
    ) -> None:
        """Has the worker begin a transfer when its arrays are ready."""

        def start(operation: engine.Operation) -> None:
            if source is not None and round_ != INITIAL_ROUND:
                self._order.ready(key.key)
            arrays = _address(source), _address(target)
            self._worker.begin(Transfer(key, round_, step, priority, *arrays, operation.complete))

        reads = [] if source is None or source is target else [source]
        writes = [] if target is None else [target]
        engine.push(start, reads, writes, _NAMES[source is not None, target is not None])


def _priority(priority: int) -> int:
    if not -(2**31) <= operator.index(priority) < 2**31:
        raise ValueError(f"priority is {priority}; it must be a whole number of 32 bits")
    return int(priority)


def _address(array: Optional[NDArray]) -> Optional[int]:
    return None if array is None else engine.address(array)


def _finish() -> None:
    """Before MXNet's engine ends: completes the operations under way, with an error if need be.

    The worker's thread goes on until all are complete. Otherwise an operation that the engine
    starts later would never be completed, and the process would never end.
    """
    this_process.give_up_if_script_failed()
    with suppress(mx.base.MXNetError):  # a caller that waited for one of these arrays has seen it
        mx.nd.waitall()
    this_process.leave()
