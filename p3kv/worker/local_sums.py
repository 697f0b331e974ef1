"""Sums of gradients that are not exchanged: a worker adds them up until one is."""

from __future__ import annotations

from typing import Dict

import numpy as np

from p3kv.worker.transfers import Transfer, memory_at


class LocalSums:
    """Adds up the gradients of pushes that the consistency rule does not exchange, by key, and
    gives them to the next push that it does. Belongs to the worker's thread."""

    def __init__(self) -> None:
        self._sums: Dict[int, np.ndarray] = {}

    def add(self, transfer: Transfer) -> None:
        """Adds a gradient, which is needed no more then."""
        key = transfer.key
        if key.size_elems:
            gradient = _gradient(transfer)
            total = self._sums.get(key.key_id)
            if total is None:
                self._sums[key.key_id] = gradient.astype(key.sum_dtype)
            else:
                np.add(total, gradient, out=total)
        transfer.done(None)

    def forget(self, key_id: int) -> None:
        """Nothing more is added up for a key."""
        self._sums.pop(key_id, None)

    def join(self, transfer: Transfer) -> None:
        """Has a push bring along what was added before, also where it has no gradient itself."""
        total = self._sums.pop(transfer.key.key_id, None)
        if total is None:
            return
        if transfer.has_gradient:
            np.add(total, _gradient(transfer), out=total)
        with np.errstate(over="ignore"):
            transfer.replace_source(total.astype(transfer.key.numpy_dtype, copy=False))


def _gradient(transfer: Transfer) -> np.ndarray:
    assert transfer.source is not None
    memory = memory_at(transfer.source, transfer.key.size_bytes)
    return np.frombuffer(memory, transfer.key.numpy_dtype)
