"""The interface between a server and an optimizer of any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Mapping

import numpy as np

from p3kv.wire.messages import KeyLayout


class SliceOptimizer(ABC):
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
    """Makes the optimizer when worker rank 0 sends settings; until then a sum is its value.

    Both raise ImportError where the framework is missing.
    """

    @abstractmethod
    def __call__(self) -> SliceOptimizer:
        """Makes it; belongs to the server's thread."""

    @abstractmethod
    def get_ready(self) -> None:
        """Imports in advance what takes long, if an optimizer is to be expected; any thread."""
