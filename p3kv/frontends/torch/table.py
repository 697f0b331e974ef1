"""A table that servers hold: a worker has the rows that it has asked for, and no others."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from p3kv.errors import NotSupportedError, ProtocolError
from p3kv.frontends.torch.row_cache import RowCache
from p3kv.frontends.torch.rows import RowsBucket
from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.tensors import array_of
from p3kv.frontends.torch.values.bucket import Gathered, Weight
from p3kv.frontends.torch.values.copies import Copies, Then
from p3kv.frontends.torch.values.table_weight import TableWeight
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.routes import RowsPull, RowsPush
from p3kv.worker.transfers import Transfer, WorkerKey

_log = logging.getLogger("p3kv")


class Table(RowsBucket):
    """Its rows come by pulls, each for the ids of a batch, with the value after the last round that
    this worker has pushed; nothing lands in the parameter, which has no memory for it."""

    is_table = True

    def __init__(
        self,
        key: WorkerKey,
        parameters: Sequence[Tuple[str, torch.nn.Parameter]],
        copies: Copies,
    ) -> None:
        super().__init__(key, parameters, copies)
        self._weight.is_seen = True  # by `rows` alone
        self.name = self._weight.name
        self.steps: Any = None
        """Those that train it, which stay as long as it does: its rows would go with them."""
        self._begin: Callable[[Transfer], None]
        self._step: Callable[[], int]
        self._speaks = False
        self._has_read = False
        """Whether a forward pass of this step has read rows, whose gradient has not left."""
        self._named: List[np.ndarray] = []
        """Rows to be asked for when it leaves, by number."""
        self._ahead: List[_Rows] = []
        """Rows that were asked for before a pass needs them."""
        self._counts = dict.fromkeys(("rows", "rows_prefetched", "rows_pulled", "waits"), 0)
        self._cache: Optional[RowCache] = None

    def connect(
        self, begin: Callable[[Transfer], None], step: Callable[[], int], speaks: bool
    ) -> None:
        """`begin` has the worker begin a transfer; `step()` is the store's newest step. `speaks`:
        whether this worker says what it leaves out."""
        self._begin, self._step, self._speaks = begin, step, speaks
        parameter = self._weight.parameter
        assert isinstance(parameter, TableWeight)
        parameter.table = self
        # Of a codec that rounds, rows of one round may come exactly and others not.
        if parameter.cache_rows and self.key.codecs.values.in_place:
            dtype = self.key.numpy_dtype
            self._cache = RowCache(parameter.cache_rows, self.key.row_elems, dtype)
            names = ("cache_hits", "cache_changed", "cache_misses", "cache_evictions")
            self._counts.update(dict.fromkeys(names, 0))

    @property
    def stats(self) -> Dict[str, int]:
        """Counts so far."""
        evictions = {} if self._cache is None else {"cache_evictions": self._cache.evictions}
        return {**self._counts, **evictions}

    def _memory(self, shape: Tuple[int, ...], dtype: torch.dtype, copies: Copies) -> torch.Tensor:
        """Of one element, in the shape of all."""
        return torch.zeros((), dtype=dtype).expand(shape)

    def rows(self, numbers: np.ndarray) -> torch.Tensor:
        """The rows with these numbers, which ascend, in memory of the host's that nobody changes.
        Waits for the round of the last step.

        Raises NotSupportedError while a gradient has left and the step has not ended: the rows may
        be those of before the step, or after it.
        """
        may_begin_forward()
        if self.pushed or self.has_gradient:
            raise NotSupportedError(
                f"rows of the table '{self.name}' were read between backward, by which its "
                "gradient left, and opt.step(): read them before backward or after step()"
            )
        self._has_read = self._has_read or torch.is_grad_enabled()
        self._ahead = [one for one in self._ahead if one.round == self.key.round]
        missing = np.ones(len(numbers), bool)
        sources = []
        for one in self._ahead:
            places = one.places(numbers)
            new = missing & one.has(numbers, places)
            if new.any():
                missing &= ~new
                sources.append((one, places))
        rest = self._ask(numbers[missing], self.key.round)
        self._counts["rows"] += len(numbers)
        self._counts["rows_prefetched"] += len(numbers) - len(rest.numbers)
        if len(rest.numbers):
            sources.append((rest, rest.places(numbers)))
        if any(not one.there.done() for one, _ in sources):
            self._counts["waits"] += 1
        for one, _ in sources:
            waited(one.there.result)
            self._keep(one)
        if len(sources) == 1 and len(sources[0][0].numbers) == len(numbers):
            return sources[0][0].elements
        rows = _Rows(self.key, numbers, self._weight.dtype, self.key.round)
        for one, places in sources:
            rows.take(one, places)
        return rows.elements

    def prefetch(self, numbers: np.ndarray) -> None:
        """The next forward pass will read these rows, which ascend: after the step of the gradient
        that is still to leave, if a pass of this step has read any."""
        if self._has_read:
            self._named.append(numbers)
        else:
            self._ahead.append(self._ask(numbers, self.key.round))

    def _ask(self, numbers: np.ndarray, round_: int) -> _Rows:
        rows, pull = self._asking(numbers, round_)
        if pull is not None:
            self._begin(pull)
        return rows

    def _asking(self, numbers: np.ndarray, round_: int) -> Tuple[_Rows, Optional[RowsPull]]:
        """Rows that come by a pull, which is to begin."""
        rows = _Rows(self.key, numbers, self._weight.dtype, round_)
        self._counts["rows_pulled"] += len(numbers)
        if not len(numbers):
            rows.there.set_result(None)
            return rows, None
        known = None
        if self._cache is not None:
            # Copied now: what is in the cache later may be of another round.
            known = np.zeros(len(numbers), np.int64)
            self._cache.copy(numbers, rows.array, known)
            rows.known = known
        key, number = self.key, self.key.next_pull()
        pull = RowsPull(key, round_, self._step(), number, rows.array, rows.done)
        pull.named, pull.known = numbers, known
        pull.exact, pull.on_rows = key.is_exact(round_), rows.note
        rows.rounds = pull.rounds
        return rows, pull

    def _keep(self, rows: _Rows) -> None:
        """Keeps rows that have arrived."""
        if self._cache is None or rows.known is None:
            return
        known, rows.known = rows.known, None
        missed = int(np.count_nonzero(known == 0))
        came = int(np.count_nonzero(rows.came))
        self._counts["cache_misses"] += missed
        self._counts["cache_changed"] += came - missed
        self._counts["cache_hits"] += len(known) - came
        rounds, end = np.empty(len(known), np.int64), 0
        for server, elems in self.key.runs:  # which may differ
            start, end = end, end + elems // self.key.row_elems
            rounds[slice(*rows.numbers.searchsorted((start, end)))] = rows.rounds.get(server, 0)
        self._cache.keep(rows.numbers, rows.array, rounds + 1)

    def give(self, rows: Any) -> None:
        """Worker rank 0 gives the initial value, `StoredRows` of a checkpoint."""
        self.begin()
        key, every = self.key, np.arange(rows.rows)
        push = RowsPush(key, INITIAL_ROUND, 0, (every, rows), self.arrived)
        push.after_pulls = key.pulls
        self._begin(push)

    def exchange(
        self,
        begin: Callable[[Transfer], None],
        round_: int,
        step: int,
        pushes: bool,
        changes: Optional[Future[bool]],
        exact: bool,
        lands: bool,
        gathered: Optional[Gathered],
        weight: float,
    ) -> Then:
        then = super().exchange(
            begin, round_, step, pushes, changes, exact, False, gathered, weight
        )
        named, self._named, self._has_read = self._named, [], False
        asking = [self._asking(numbers, round_) for numbers in named]
        self._ahead += [rows for rows, _ in asking]

        def begin_with(source: Optional[torch.Tensor]) -> None:
            then(source)
            for _, pull in asking:
                if pull is not None:
                    begin(pull)

        return begin_with

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

    def wait(self) -> None:
        """Also for rows that were asked for before a pass needs them."""
        super().wait()
        for one in self._ahead:
            waited(one.there.result)

    def _take(
        self, weights: Collection[Weight], frees: Collection[Weight], reads: bool = False
    ) -> None:
        """Waits until the last push has left."""
        self.await_value()
        if self.error is not None:
            raise self.error


class _Rows:
    """Rows of a round that have been asked for. `done` is called in the worker's thread."""

    def __init__(
        self, key: WorkerKey, numbers: np.ndarray, dtype: torch.dtype, round_: int
    ) -> None:
        self.numbers = numbers
        self.round = round_
        self.elements = torch.empty((len(numbers), key.row_elems), dtype=dtype, device="cpu")
        self.array = array_of(self.elements)
        self.rounds: Mapping[int, int] = {}
        """By server, those of the values that have arrived."""
        self.known: Optional[np.ndarray] = None
        """Where there is a cache: as a pull has it, until the rows are there."""
        self.came = np.zeros(len(numbers), bool)
        """Which have arrived."""
        self._called = key.called
        self.there: Future[None] = Future()

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Where rows are here, if they are here."""
        return np.minimum(self.numbers.searchsorted(numbers), max(0, len(self.numbers) - 1))

    def has(self, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Which of these rows are here, at these places."""
        if not len(self.numbers):
            return np.zeros(len(numbers), bool)
        here: np.ndarray = self.numbers[places] == numbers
        return here

    def take(self, other: _Rows, places: np.ndarray) -> None:
        """Copies the rows that another one has, at these places there."""
        here = other.has(self.numbers, places)
        self.array[here] = other.array[places[here]]

    def note(self, numbers: np.ndarray) -> None:
        """These rows have arrived."""
        self.came[self.places(numbers)] = True

    def done(self, error: Optional[BaseException]) -> None:
        lacks = ~self.came if self.known is None else ~self.came & (self.known == 0)
        if error is None and lacks.any():
            error = ProtocolError(f"rows of {self._called} have not come that were asked for")
        if error is None:
            self.there.set_result(None)
        else:
            self.there.set_exception(error)
