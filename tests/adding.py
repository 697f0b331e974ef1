"""Optimizers for tests, whose numbers are exact."""

from __future__ import annotations

from typing import Optional

import numpy as np

from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.messages import DeclaredKey


class Adding(Optimizer):
    """weight += total: exact for whole numbers, and without states."""

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("there is nothing to configure")

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        weight += total

    def export(self, key: DeclaredKey, index: int) -> None:
        return None

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        raise AssertionError("there are no states")


class AddingWhole(Adding):
    """weight += total + the largest element of total: only right for a whole tensor."""

    whole_tensors = True

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        assert index == WHOLE
        assert total.size == np.prod(key.shape)
        weight += total + total.max()
