"""A table that servers hold: a worker has the rows that it has asked for, and no others."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any, Callable, Dict, Optional

import numpy as np
import torch

from p3kv.errors import NotSupportedError, ProtocolError
from p3kv.frontends.torch.rows import LateRows
from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.tensors import array_of
from p3kv.frontends.torch.values.copies import Copies, Then
from p3kv.frontends.torch.values.early import EarlyWrites
from p3kv.frontends.torch.values.table_weight import TableWeight
from p3kv.worker.routes import RowsPull
from p3kv.worker.transfers import Transfer, WorkerKey

_log = logging.getLogger("p3kv")


class LateTable(LateRows):
    """Its rows come by pulls, each for the ids of a batch, with the value after the last round that
    this worker has pushed; nothing lands in the parameter, which has no memory for it."""

    is_table = True

    def __init__(
        self,
        key: WorkerKey,
        parameter: torch.nn.Parameter,
        name: str,
        early: EarlyWrites,
        copies: Copies,
    ) -> None:
        super().__init__(key, parameter, name, early, copies)
        self.is_seen = True  # by `rows` alone
        self._lock = threading.Lock()
        self._speaks = False
        self.steps: Any = None
        """Those that train it, which stay as long as it does: its rows would go with them."""
        self._begin: Callable[[Transfer], None]
        self._step: Callable[[], int]
        self.stats: Dict[str, int] = {"rows": 0, "rows_pulled": 0, "waits": 0}

    def connect(
        self, begin: Callable[[Transfer], None], step: Callable[[], int], speaks: bool
    ) -> None:
        """`begin` has the worker begin a transfer; `step()` is the store's newest step. `speaks`:
        whether this worker says what it leaves out."""
        self._begin, self._step, self._speaks = begin, step, speaks
        assert isinstance(self.parameter, TableWeight)
        self.parameter.table = self

    def _memory(self) -> torch.Tensor:
        """Of one element, in the shape of all."""
        return torch.zeros((), dtype=self.parameter.dtype).expand(self.parameter.shape)

    def rows(self, numbers: np.ndarray) -> torch.Tensor:
        """The rows with these numbers, which ascend, in memory of the caller's on the host. Waits
        for the round of the last step.

        Raises NotSupportedError while a gradient has left and the step has not ended: the rows may
        be those of before the step, or after it.
        """
        may_begin_forward()
        if self.pushed or self.leaving is not None:
            raise NotSupportedError(
                f"rows of the table '{self.name}' were read between backward, by which its "
                "gradient left, and opt.step(): read them before backward or after step()"
            )
        with self._lock:
            rows = _Rows(self.key, numbers, self.parameter.dtype)
            self.stats["rows"] += len(numbers)
            if len(numbers):
                self._ask(rows, self.key.round)
                self.stats["waits"] += 1
                waited(rows.there.result)
            return rows.elements

    def _ask(self, rows: _Rows, round_: int) -> None:
        self.stats["rows_pulled"] += len(rows.numbers)
        self._begin(
            RowsPull(
                self.key, round_, self._step(), 0, rows.put, rows.done, (self.key.ask(),),
                named=rows.numbers,
            )
        )  # fmt: skip

    def give(self, value: np.ndarray) -> None:
        """Worker rank 0 gives the initial value, of a checkpoint."""
        whole = torch.from_numpy(np.ascontiguousarray(value)).reshape(self.parameter.shape)
        self.begin()
        super().exchange(self._begin, self.key.round, 0, True, None, True, lands=False)(whole)

    def exchange(
        self,
        begin: Callable[[Transfer], None],
        round_: int,
        step: int,
        pushes: bool,
        changes: Optional[Future[bool]],
        exact: bool,
        lands: bool,
    ) -> Then:
        return super().exchange(begin, round_, step, pushes, changes, exact, lands=False)

    def say_left_out(self) -> None:
        """Of a `state_dict` that the script asks for; once."""
        if self._speaks:
            self._speaks = False
            _log.warning(
                "the table '%s' stays on the servers: state_dict() of model and optimizer have "
                "nothing of it, and checkpoints (P3KV_CHECKPOINT_DIR) have all", self.name
            )  # fmt: skip

    def arm(self) -> None:
        """Nobody reads the parameter."""

    def _take(self, is_seen_by_all: Callable[[], bool], stays_late: bool = False) -> None:
        """Waits until the last push has left."""
        if not self._there.is_set():
            waited(self._there.wait)
        if self._error is not None:
            raise self._error


class _Rows:
    """Rows that have been asked for. `put` and `done` are called in the worker's thread."""

    def __init__(self, key: WorkerKey, numbers: np.ndarray, dtype: torch.dtype) -> None:
        self.numbers = numbers
        self.elements = torch.empty((len(numbers), key.row_elems), dtype=dtype, device="cpu")
        self._array = array_of(self.elements)
        self._called = key.called
        self.there: Future[None] = Future()

    def put(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        places = self.numbers.searchsorted(numbers)
        if not np.array_equal(self.numbers[np.minimum(places, len(self.numbers) - 1)], numbers):
            raise ProtocolError(f"it sent rows of {self._called} that nobody asked for")
        self._array[places] = rows

    def done(self, error: Optional[BaseException]) -> None:
        if error is None:
            self.there.set_result(None)
        else:
            self.there.set_exception(error)
