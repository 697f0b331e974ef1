"""The interface between a server and an optimizer of any framework."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Dict, Iterator, Optional, Sequence

import numpy as np

from p3kv.common.registry import Registry
from p3kv.errors import ConfigError, ProtocolError
from p3kv.wire.messages import DeclaredKey, OptimizerSettings, decode

WHOLE = -1
"""In place of a slice's index: all elements of a key, which one server keeps."""
OUTER = "p3kv"
"""The name of p3kv's own optimizer, the outer one, in the table beside those of front ends."""


@dataclass(frozen=True)
class State:
    """Optimizer's memory of consecutive elements of a key: of a slice, or of several.

    It holds plain values only, so that it can be stored, and cut for slices of any size and for any
    number of servers. The state of a whole tensor is stored as it is, and never cut.
    """

    elements: Dict[str, np.ndarray]
    """Flat arrays with one number for each element, by names of the optimizer's own. Of a whole
    tensor: arrays of any shape."""
    numbers: Dict[str, Any]
    """Values that are the same for all elements of the key, as None, bools, ints, floats, strs,
    lists and dicts."""

    @classmethod
    def joined(cls, states: Sequence[State]) -> State:
        """The state of all elements of `states`, of the same key, in this order."""
        first = states[0]
        if len(states) == 1:
            return first
        assert all(state.numbers == first.numbers for state in states), "not of the same update"
        elements = {
            name: np.concatenate([state.elements[name] for state in states])
            for name in first.elements
        }
        return cls(elements, first.numbers)

    @staticmethod
    def are_alike(states: Sequence[State]) -> bool:
        """Whether states of consecutive elements can be joined: all else is the same of all."""
        first = states[0]
        return all(
            (one.numbers, one.elements.keys()) == (first.numbers, first.elements.keys())
            for one in states
        )

    def cut(self, lengths: Sequence[int]) -> Iterator[State]:
        """The states of consecutive parts; their arrays are slices of this state's."""
        starts = [0, *accumulate(lengths)]
        for start, end in zip(starts, starts[1:]):
            yield State(
                {name: array[start:end] for name, array in self.elements.items()}, self.numbers
            )


class Optimizer(ABC):
    """Updates weights slice by slice, or whole tensors, with state of its own for each.

    Belongs to one thread.
    """

    whole_tensors = False
    """Whether updates may need whole tensors; only then `needs_whole` is asked."""

    needs_rank_0 = False
    """Whether each update needs something that worker rank 0 sends for it."""

    in_step = True
    """Whether worker rank 0 has begun a step with it: its settings may change until then."""

    last_step = 0
    """The newest step of worker rank 0 that has updated something here, of own rounds: its settings
    hold for other workers' rounds."""

    weight: Optional[float] = None
    """Sum of the weights of all workers whose gradients are in the sum that the next update takes,
    each 1 where a script does not say otherwise; None where a sum is one worker's own."""

    def needs_whole(self, step: Optional[int]) -> bool:
        """Whether the updates of a step need whole tensors; None: by the newest settings.

        Then a key's round ends for all its slices at once, and `update` is called once for the key.
        The key must be whole on one server: workers declare it so.
        """
        return self.whole_tensors

    @abstractmethod
    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        """Takes settings, as the worker's front end wrote them, that hold from a step on.

        No update of a step before `oldest_step` follows. Raises ProtocolError for settings
        that it can't read.
        """

    @abstractmethod
    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        """Updates `weight` in place with `total`, the sum of all workers' gradients.

        Both are flat and of the key's dtype, but a half-precision key's total is float32. The
        caller owns them and may reuse them afterwards. Of a key that keeps means, `total` is the
        mean gradient when it returns.
        With the index WHOLE they have all elements of a tensor of `key.shape`, nobody else uses
        them, and the optimizer may keep `total`.
        `step` counts the job's updates as worker rank 0 has seen them, 1 for the first. If it is
        None, the newest settings hold: worker rank 0 has left.
        """

    def predicted(
        self, key: DeclaredKey, index: int, weight: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        """The weight of a slice as it will probably be so many updates later, as an array of its
        own; None where nothing tells, so that the weight itself is sent.

        `damped`: momentum decays meanwhile (`p3kv.consistency.predicting`). Called after an update
        of the slice, and before the next. `weight` stays as it is. Not asked where updates need
        whole tensors.
        """
        return None

    def updates_touched_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        """Whether a step's update of a key of rows changes only the rows that have a gradient, each
        on its own.

        Then `update_rows` may be called several times for an update, with some of the rows each.
        """
        return False

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        """Whether a step's update of a key of rows may change rows that have no gradient."""
        return True

    def update_rows(
        self,
        key: DeclaredKey,
        weight: np.ndarray,
        numbers: np.ndarray,
        rows: np.ndarray,
        step: Optional[int],
        ends_update: bool = True,
    ) -> None:
        """Updates `weight`, the rows of a key of rows that a server keeps, in place.

        `rows` are the sums of the rows with these `numbers`, which ascend; all others are 0. Both
        are two-dimensional and of the key's dtype, but a half-precision key's `rows` are float32;
        nobody else uses `rows`. `ends_update`: the next call is for another update. States are
        those of the index WHOLE.
        """
        raise ConfigError(f"this front end has no optimizer for keys of rows, such as {key.key!r}")

    @abstractmethod
    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        """Removes and returns the state of a slice, or of a whole tensor; None where it has none.

        Called between two updates of the whole key. Arrays belong to the caller.
        """

    def copied(self, key: DeclaredKey, index: int) -> Optional[State]:
        """Exports a state like `export`, but the optimizer keeps it."""
        state = self.export(key, index)
        if state is not None:
            self.load(key, index, state)
        return state

    def seen(self, key: DeclaredKey, index: int) -> Optional[State]:
        """A state like `copied`, whose arrays may be those that the next update changes."""
        return self.copied(key, index)

    @abstractmethod
    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        """Gives a slice a state, made of exported ones with `State.joined` and `State.cut`, or a
        whole tensor an exported one.

        Copies the arrays.
        """


class MakeOptimizer(ABC):
    """Makes a front end's optimizer. A server makes one object, without arguments, for its job.

    Both raise ImportError where the framework is missing.
    """

    @abstractmethod
    def __call__(self) -> Optimizer:
        """Makes it; belongs to the server's thread."""

    @abstractmethod
    def get_ready(self) -> None:
        """Imports in advance what takes long, if an optimizer is to be expected.

        Runs in a thread while the main thread serves inside the import of p3kv. So it must not
        import a module of p3kv's: it would wait for that import to end.
        """


OPTIMIZERS: Registry[MakeOptimizer] = Registry("front end", "every server")
"""Classes that make the optimizer of each front end, by the front end's name."""


class JobOptimizers:
    """Makes each store's optimizer when worker rank 0 sends settings, whose front end says which.

    Belongs to the server's thread, except `get_ready`.
    """

    def __init__(self) -> None:
        self._makers: Dict[str, MakeOptimizer] = {
            name: OPTIMIZERS.find(name)() for name in OPTIMIZERS.names()
        }
        self._front_end = ""
        self._optimizers: Dict[int, Optimizer] = {}

    def get_ready(self) -> None:
        """Imports in advance what takes long; from any thread."""
        for maker in self._makers.values():
            # If the job needs a framework that is missing, `configure` raises it again.
            with suppress(ImportError):
                maker.get_ready()

    def configure(
        self, store: int, from_step: int, payload: memoryview, oldest_step: int
    ) -> Optimizer:
        """Gives an OPTIMIZER frame's settings to the store's optimizer, and returns it.

        Raises ProtocolError for settings that it can't read, of a front end that is not registered
        here, and of another one than before; ImportError where the framework is missing.
        """
        settings: OptimizerSettings = decode(payload, OptimizerSettings)
        if settings.front_end == OUTER:
            pass  # with any front end
        elif not self._front_end:
            self._front_end = settings.front_end
        elif settings.front_end != self._front_end:
            raise ProtocolError(
                f"it sent optimizer settings of the front end {settings.front_end!r}, after those "
                f"of {self._front_end!r}; a job has one front end"
            )
        optimizer = self._optimizers.get(store)
        if optimizer is None:
            optimizer = self._optimizers[store] = self._made(settings.front_end)
        optimizer.configure(from_step, settings.settings, oldest_step)
        begins = settings.in_step and not optimizer.in_step
        optimizer.last_step = max(optimizer.last_step, from_step if begins else oldest_step)
        optimizer.in_step = settings.in_step
        return optimizer

    def forget(self, store: int) -> None:
        """Nobody has a store's keys any more."""
        self._optimizers.pop(store, None)

    def _made(self, front_end: str) -> Optimizer:
        maker = self._makers.get(front_end)
        if maker is None:
            raise ProtocolError(
                f"it sent optimizer settings of the front end {front_end!r}, and this server has "
                f"only {', '.join(self._makers)}; run the same p3kv, and the same P3KV_PLUGINS, "
                "everywhere"
            )
        optimizer = maker()
        # A framework's hundred thousand objects stay anyway: neither a collection between two
        # frames nor the last one, when the process ends, is to go through them.
        gc.freeze()
        return optimizer
