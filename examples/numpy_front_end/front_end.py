"""A front end for NumPy arrays: all that p3kv needs of a framework.

A script has its weights in a `Trainer`; servers run `Momentum`. Every process imports this module
(`P3KV_PLUGINS`), so that servers know the optimizer by the front end's name. docs/api.md says more.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

import p3kv  # noqa: F401  # it gives this process its role

# isort: split
from p3kv.common import words
from p3kv.errors import ProtocolError
from p3kv.server.optimizer import OPTIMIZERS, MakeOptimizer, Optimizer, State
from p3kv.store.client import Client
from p3kv.store.resuming import Counts, GoesOn
from p3kv.store.script_optimizer import ScriptOptimizer
from p3kv.store.states import give_state
from p3kv.wire.messages import DeclaredKey
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

NAME = "p3kv_numpy"


class Momentum(Optimizer):
    """Gradient descent with momentum, by the mean of all workers' gradients, on servers.

    velocity = momentum * velocity + gradient, weight -= rate * velocity
    """

    def __init__(self) -> None:
        self._settings: Dict[int, Tuple[float, float, int]] = {}
        """By the step from which they hold: rate, momentum, workers."""
        self._velocities: Dict[Tuple[int, int], np.ndarray] = {}

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        try:
            rate, momentum, workers = json.loads(settings)
        except ValueError as error:
            raise ProtocolError(f"it sent settings that can't be read: {error}") from None
        self._settings[from_step] = float(rate), float(momentum), int(workers)
        older = [step for step in self._settings if step <= oldest_step]
        for step in older[:-1]:
            del self._settings[step]

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        newest = max(one for one in self._settings if step is None or one <= step)
        rate, momentum, workers = self._settings[newest]
        velocity = self._velocities.setdefault((key.key_id, index), np.zeros_like(total))
        velocity *= weight.dtype.type(momentum)
        velocity += total / weight.dtype.type(workers if self.weight is None else self.weight)
        weight -= weight.dtype.type(rate) * velocity

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        velocity = self._velocities.pop((key.key_id, index), None)
        return None if velocity is None else State({"velocity": velocity}, {})

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        self._velocities[key.key_id, index] = state.elements["velocity"].copy()


class MakeMomentum(MakeOptimizer):
    """Makes it; there is nothing to import first."""

    def __call__(self) -> Optimizer:
        return Momentum()

    def get_ready(self) -> None:
        pass


class Settings(ScriptOptimizer):
    """The optimizer as the script has it. `rate` may change between two steps."""

    name = Momentum.__name__
    counts_updates = False

    def __init__(self, rate: float, momentum: float, workers: int) -> None:
        self.rate = rate
        self._momentum = momentum
        self._workers = workers
        self._told = self.settings

    @property
    def settings(self) -> bytes:
        return json.dumps([self.rate, self._momentum, self._workers]).encode()

    def begin_step(self, step: int, updates: int) -> Optional[bytes]:
        if not self.has_changed():
            return None
        self._told = self.settings
        return self._told

    def has_changed(self) -> bool:
        return self.settings != self._told


class _GoesOn(GoesOn[Settings]):
    """What a job that goes on from a checkpoint gives its servers."""

    def __init__(self, store: WorkerStore) -> None:
        self._store = store

    def optimizer(self, fresh: Settings, counts: Counts, since_step: int) -> Settings:
        return fresh

    def give(
        self, key: WorkerKey, states: Sequence[State], optimizer: Settings, member: int = 0
    ) -> None:
        give_state(self._store, key, State.joined(states) if states else None, whole=False)


class Trainer:
    """Trains arrays with p3kv. All workers make it alike, and push the same keys in each step."""

    def __init__(
        self, weights: Mapping[str, np.ndarray], rate: float, momentum: float = 0.0
    ) -> None:
        """`weights`: contiguous arrays by name, in the order in which the forward pass needs
        them. They are worker 0's afterwards, or the checkpoint's from which the job goes on."""
        self._client = Client(NAME, _GoesOn)
        self.rank, self.num_workers = self._client.rank, self._client.num_workers
        self.resumed_steps = 0 if self._client.own.resumed is None else self._client.own.steps
        """How many steps the job had made at its checkpoint: the script skips their batches."""
        self._weights = dict(weights)
        self._keys = {
            name: self._client.declare(number, array.shape, str(array.dtype), name)
            for number, (name, array) in enumerate(self._weights.items())
        }
        self.optimizer = Settings(rate, momentum, self.num_workers)
        self._client.set_optimizer(self.optimizer)
        self._coming: Dict[str, Future[None]] = {}
        for name, array in self._weights.items():
            done = self._coming[name] = Future()
            self._client.first_value(self._keys[name], array, _into(done))
        self._client.publish_order([key.key for key in self._keys.values()])
        self._step: Any = None
        self.wait()

    def push(self, name: str, gradient: np.ndarray) -> None:
        """A gradient is ready, in any order: it leaves at once, while others are computed. Nobody
        may change it, or the weight, before `value(name)`."""
        weight = self._weights[name]
        if gradient.shape != weight.shape or gradient.dtype != weight.dtype:
            raise ValueError(
                f"the gradient of '{name}' is {gradient.dtype} of shape {gradient.shape}; give one "
                f"like the weight, which is {weight.dtype} of shape {weight.shape}"
            )
        if self._step is None:
            self._step = self._client.begin_step()
            self._step.__enter__()
        gradient = np.ascontiguousarray(gradient)
        done = self._coming[name] = Future()
        self._client.begin(
            self._client.push(self._keys[name]), gradient.ctypes.data, weight.ctypes.data,
            _into(done, gradient),
        )  # fmt: skip

    def step(self) -> None:
        """All gradients of this step are pushed."""
        if self._step is None:
            raise ValueError("step() was called before any gradient was pushed")
        self._step.__exit__(None, None, None)
        self._step = None
        self._client.end_step()

    def value(self, name: str) -> np.ndarray:
        """A weight with all steps that have been made; waits for it."""
        self._coming[name].result()
        return self._weights[name]

    def wait(self) -> None:
        """Waits for all weights."""
        for name in self._weights:
            self.value(name)

    def velocity(self, name: str) -> Optional[np.ndarray]:
        """What the servers' optimizer remembers of a weight; None before its first step."""
        state = self._client.states(self._keys[name])
        if state is None:
            return None
        return state.elements["velocity"].reshape(self._weights[name].shape)


def _into(done: Future[None], gradient: Optional[np.ndarray] = None) -> Any:
    """Has a future be told of the end of a transfer, until which its gradient is kept."""

    def tell(error: Optional[BaseException], kept: Optional[np.ndarray] = gradient) -> None:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    return tell


OPTIMIZERS.register(NAME, MakeMomentum)
words.add(NAME, words.Words(use_store="front_end.Trainer", create_store="front_end.Trainer(...)"))
