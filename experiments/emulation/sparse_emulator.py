"""An emulated model of which some arrays are tables that workers have by rows.

Rows are drawn by frequency, as words of a text have it: the word in place n of frequency occurs 1/n
times as often as the first one (Zipf's law). A batch has as many different rows as its table's
`touched`. All workers draw from the same frequencies, so they touch the frequent rows together, as
workers that read one text do. Rows are in no order of frequency: each server keeps as many frequent
ones.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from experiments.emulation.emulator import EmulatedModel
from experiments.models.parallax import SparseModel, Table

_BATCHES = 4
"""Batches take turns: their rows are drawn once, since drawing them costs time."""


def drawn_rows(random: np.random.RandomState, rows: int, touched: int) -> np.ndarray:
    """Numbers of so many different rows in ascending order: the first ones of endless draws."""
    place = np.random.RandomState(0).permutation(rows) + 1
    # When a word comes for the first time, if each comes at random times by its frequency.
    first = random.exponential(size=rows) * place
    return np.sort(np.argpartition(first, touched - 1)[:touched])


class SparseEmulatedModel(EmulatedModel):
    """One worker's copy: of its tables it has the rows that a batch touches.

    An iteration pushes these rows' gradients and pulls the rows of the next batch, which the next
    forward pass waits for. `rank` decides which rows they are. With `gathers` all workers get all
    gradients of rows, and each would update a table of its own, which costs nothing here. Use it as
    `EmulatedModel`.
    """

    def __init__(
        self, of: SparseModel, rank: int, dilation: float, gathers: bool, **how: Any
    ) -> None:
        keys = of.model.keys
        self._tables: Dict[int, Table] = {keys[table.name]: table for table in of.tables}
        self._gathers = gathers
        self._random = np.random.RandomState(rank)
        self._batches: Dict[int, List[Tuple[NDArray, NDArray, NDArray]]] = {}
        """By key: numbers of rows, where they are pulled into, and their gradient."""
        self._at = dict.fromkeys(self._tables, 0)
        super().__init__(of.model, dilation, **how)

    def _new_weight(self, key: int) -> NDArray:
        table = self._tables.get(key)
        if table is None:
            return super()._new_weight(key)
        shape = (table.rows, table.columns)
        elements = mx.nd.zeros((table.touched, table.columns))
        batches = []
        for _ in range(_BATCHES):
            rows = drawn_rows(self._random, table.rows, table.touched)
            if self._gathers:
                out, gradient = mx.nd.zeros(elements.shape), mx.nd.zeros(elements.shape)
            else:
                out = mx.nd.sparse.zeros("row_sparse", shape)
                gradient = mx.nd.sparse.row_sparse_array((elements, rows), shape)
            batches.append((mx.nd.array(rows, dtype="int64"), out, gradient))
        self._batches[key] = batches
        return batches[0][1]

    def _new_gradient(self, key: int, gradient: float) -> NDArray:
        if key in self._tables:
            return self._batches[key][0][2]
        return super()._new_gradient(key, gradient)

    def _broadcast_key(self, kv: Any, key: int) -> None:
        table = self._tables.get(key)
        if table is None:
            super()._broadcast_key(kv, key)
        if table is None or self._gathers:
            return
        shape = (table.rows, table.columns)
        initial = mx.nd.sparse.zeros("row_sparse", shape)
        if kv.rank == 0:
            every = np.arange(table.rows)
            initial = mx.nd.sparse.row_sparse_array((mx.nd.zeros(shape), every), shape)
        kv.init(key, initial)
        rows, out, _ = self._batches[key][0]
        kv.row_sparse_pull(key, out=out, row_ids=rows, priority=-key)

    def _exchange_key(self, kv: Any, key: int) -> None:
        if key not in self._tables:
            super()._exchange_key(kv, key)
            return
        pushed, _, gradient = self._batches[key][self._at[key]]
        self._at[key] = (self._at[key] + 1) % _BATCHES
        rows, self.weights[key], self.gradients[key] = self._batches[key][self._at[key]]
        if self._gathers:
            kv.gather(key, gradient, pushed, out=self.weights[key], priority=-key)
            return
        kv.push(key, gradient, priority=-key)
        kv.row_sparse_pull(key, out=self.weights[key], row_ids=rows, priority=-key)
