"""The interface between a server and an optimizer of any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Dict, Mapping, Optional

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.registry import Registry
from p3kv.wire.messages import KeyLayout, OptimizerSettings, decode


class Optimizer(ABC):
    """Updates weights slice by slice, with state of its own for each slice.

    Belongs to one thread.
    """

    @abstractmethod
    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        """Takes settings, as the worker's front end wrote them, that hold from a step on.

        No update of a step before `oldest_step` follows. Raises ProtocolError for settings
        that it can't read.
        """

    @abstractmethod
    def update(
        self, layout: KeyLayout, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        """Updates `weight` in place with `total`, the sum of all workers' gradients.

        Both are flat and of the key's dtype; the caller owns them and may reuse them afterwards.
        `step` counts the job's updates as worker rank 0 has seen them, 1 for the first.
        """

    @abstractmethod
    def regroup(
        self, layout: KeyLayout, before: Mapping[int, int], after: Mapping[int, int]
    ) -> None:
        """Re-slices the states of a key's slices, between two updates of the whole key.

        `before` and `after` are the slices' lengths by index, in the order of their elements.
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


OPTIMIZERS: Registry[MakeOptimizer] = Registry("front end")
"""What makes the optimizer of each front end, by the front end's name."""


class JobOptimizer:
    """Makes the job's optimizer when worker rank 0 sends settings, whose front end says which.

    Belongs to the server's thread, except `get_ready`.
    """

    def __init__(self) -> None:
        self._makers: Dict[str, MakeOptimizer] = {
            name: OPTIMIZERS.find(name)() for name in OPTIMIZERS.names()
        }
        self._front_end = ""
        self._optimizer: Optional[Optimizer] = None

    def get_ready(self) -> None:
        """Imports in advance what takes long; from any thread."""
        for maker in self._makers.values():
            # If the job needs a framework that is missing, `configure` raises it again.
            with suppress(ImportError):
                maker.get_ready()

    def configure(self, from_step: int, payload: memoryview, oldest_step: int) -> Optimizer:
        """Gives an OPTIMIZER frame's settings to the job's optimizer, and returns it.

        Raises ProtocolError for settings that it can't read, of a front end that is not registered
        here, and of another one than before; ImportError where the framework is missing.
        """
        settings: OptimizerSettings = decode(payload, OptimizerSettings)
        if self._optimizer is None:
            self._optimizer = self._made(settings.front_end)
            self._front_end = settings.front_end
        elif settings.front_end != self._front_end:
            raise ProtocolError(
                f"it sent optimizer settings of the front end {settings.front_end!r}, after those "
                f"of {self._front_end!r}; a job has one front end"
            )
        self._optimizer.configure(from_step, settings.settings, oldest_step)
        return self._optimizer

    def _made(self, front_end: str) -> Optimizer:
        maker = self._makers.get(front_end)
        if maker is None:
            raise ProtocolError(
                f"it sent optimizer settings of the front end {front_end!r}, and this server has "
                f"only {', '.join(self._makers)}; run the same p3kv, and the same P3KV_PLUGINS, "
                "everywhere"
            )
        return maker()
