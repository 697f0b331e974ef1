"""Optimizer states that are on the servers: saved into MXNet's files, and loaded from them."""

from __future__ import annotations

from typing import Any, Callable, Dict, NoReturn

import mxnet as mx

from p3kv.common.combinations import Feature
from p3kv.errors import NotSupportedError, StatesError
from p3kv.frontends.mxnet import environment
from p3kv.frontends.mxnet.optimizers import saved_states
from p3kv.frontends.mxnet.optimizers.plain_states import OfKey
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.store.pushes import Pushes
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore


class ServerStates:
    """States that the servers' optimizer has of a store's keys. Belongs to the script's thread."""

    def __init__(
        self,
        own: WorkerStore,
        pushes: Pushes[WorkerOptimizer],
        rank: int,
        barrier: Callable[[str], None],
    ) -> None:
        """`barrier(purpose)` waits for all workers."""
        self._own = own
        self._pushes = pushes
        self._rank = rank
        self._barrier = barrier

    def of_keys(self) -> Dict[Key, Any]:
        """MXNet's state of each key that the servers' optimizer has updated."""
        optimizer = self._optimizer("saved")
        mx.nd.waitall()  # all pushes are sent
        return {key: one.state for key, one in self._remembered(optimizer).items()}

    def save(self, fname: str, dump_optimizer: bool) -> None:
        """Writes them as MXNet's Updater does, with the optimizer if it is to be dumped."""
        optimizer = self._optimizer("saved")
        with saved_states.replacing(fname, self._rank) as file:
            mx.nd.waitall()  # all pushes are sent
            saved_states.write(file, optimizer, self._remembered(optimizer), dump_optimizer)

    def load(self, fname: str) -> mx.optimizer.Optimizer:
        """Has the servers go on from a file; returns the optimizer that the script goes on with."""
        optimizer = self._optimizer("loaded")
        keys = self._own.declared()
        loaded = saved_states.read(fname, optimizer.optimizer, keys)
        mx.nd.waitall()  # all pushes are sent
        self._pushes.wait_for_unknown()
        updates, kept = loaded.updates, loaded.kept
        if updates is None:
            updates = {key: self._pushes.updates.get(key, 0) for key in loaded.states}
            if optimizer.kept_by_key is not None:
                kept = {key: found.kept for key, found in self._remembered(optimizer).items()}
        purpose = f"to load optimizer states ({saved_states.digest(loaded, updates)})"
        self._barrier(purpose)
        if loaded.optimizer is not None:
            loaded.optimizer.param_dict = optimizer.optimizer.param_dict
            since_step = self._pushes.step - loaded.steps
            optimizer = WorkerOptimizer(
                loaded.optimizer, since_step, loaded.remembered, noted=updates
            )
            self._pushes.go_on_with(optimizer, loaded.steps)
        self._pushes.updates = updates
        if self._rank == 0:
            of_keys = {
                key: OfKey(state, updates[key], kept.get(key))
                for key, state in loaded.states.items()
            }
            saved_states.give(self._own, keys, of_keys, optimizer)
        self._barrier(purpose)
        return optimizer.optimizer

    def _remembered(self, optimizer: WorkerOptimizer) -> Dict[Key, OfKey]:
        """Fetches what the servers' optimizer remembers of the keys that it has updated."""
        self._pushes.wait_for_unknown()
        keys = [key for key in self._own.declared() if key.key in self._pushes.updates]
        return saved_states.fetched(self._own, keys, optimizer)

    def _optimizer(self, what: str) -> WorkerOptimizer:
        self._own.combine({Feature.STATES}, f"optimizer states can't be {what}")
        if self._pushes.optimizer is None:
            raise StatesError(
                f"the servers have no optimizer whose states could be {what}: call "
                "kv.set_optimizer first. Where workers update, states are there: a Trainer's "
                "save_states and load_states work, and a Module's save_optimizer_states and "
                "load_optimizer_states"
            )
        return self._pushes.optimizer


class ServersUpdater:
    """The optimizer of the servers, as the attributes of MXNet's Updater show it. gluon's Trainer
    takes `optimizer` from here when it has loaded states. Belongs to the script's thread."""

    def __init__(
        self, optimizer: mx.optimizer.Optimizer, fetch: Callable[[], Dict[Key, Any]]
    ) -> None:
        """`fetch` asks the servers for all states."""
        self.optimizer = optimizer
        """The script's own; what it changes here holds from the next step on."""
        self._fetch = fetch

    @property
    def states(self) -> Dict[Key, Any]:
        """A copy of MXNet's state of each key that was updated, after all of this worker's pushes.
        Raises StatesError where states can't be saved."""
        return self._fetch()

    def __call__(self, *_: Any) -> NoReturn:
        raise NotSupportedError(
            "updates run on the servers, not where the script runs; push the gradient to the "
            f"store, or {environment.WORKERS}"
        )
