"""Keys of which only touched rows travel: row_sparse gradients and row_sparse weights."""

from __future__ import annotations

from concurrent.futures import Future
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import engine, row_memory
from p3kv.frontends.mxnet.arrays import (
    ROW_SPARSE,
    check_fit,
    check_sources,
    dtype_name,
    is_on_cpu,
    listed,
    spread,
)
from p3kv.frontends.mxnet.refusals import KeyMismatchError
from p3kv.frontends.mxnet.row_memory import elements_at, give_rows, rows_of, without_memory
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Key
from p3kv.worker.routes import RowsPull, RowsPush
from p3kv.worker.transfers import Transfer, WorkerKey

_PUSH, _PULL, _ROW_PULL = b"p3kv_push_rows", b"p3kv_pull_rows", b"p3kv_row_sparse_pull"
"""Names of operations in MXNet's profiler."""


def layout(value: NDArray, outs: Iterable[NDArray], expected: bool) -> str:
    """The layout of a key with this initial value, and with these arrays for its weight.

    Only touched rows travel where the weight or its gradient is row_sparse. `expected`: the
    gradient is known to be. Raises NotSupportedError where a build's arrays can't be read.
    """
    gradients = (array.grad for array in (value, *outs) if isinstance(array, NDArray))
    if value.stype == ROW_SPARSE:
        chosen = "sparse_rows"
    elif expected or any(one is not None and one.stype == ROW_SPARSE for one in gradients):
        chosen = "touched_rows"
    else:
        return "dense"
    row_memory.bind()
    return chosen


def ids_by_out(keys: Any, outs: Any, row_ids: Any) -> List[Tuple[Key, List[NDArray], NDArray]]:
    """Arguments of `row_sparse_pull`: each key with arrays, and the rows that they get. As in
    MXNet, the arrays of a key may share row ids, or have some each."""
    if isinstance(keys, (list, tuple)):
        if isinstance(row_ids, NDArray):
            row_ids = [row_ids] * len(keys)
        if not len(keys) == len(outs) == len(row_ids):
            raise ValueError(
                f"{len(keys)} keys are given with {len(outs)} arrays and {len(row_ids)} row_ids"
            )
        several = zip(keys, outs, row_ids)
        return [asked for one in several for asked in ids_by_out(*one)]
    arrays, ids = listed(outs), listed(row_ids)
    if len(ids) == 1:
        return [(keys, arrays, ids[0])]
    if len(ids) != len(arrays):
        raise ValueError(f"{len(arrays)} arrays are given with {len(ids)} row_ids")
    return [(keys, [array], one) for array, one in zip(arrays, ids)]


def named_rows(called: str, rows: int, row_ids: Any) -> np.ndarray:
    """The numbers of rows that a script has named, ascending and each once, as int64.

    A dtype that can't tell all rows of the key apart is refused whatever the numbers are: one that
    was rounded looks like any other. Waits for `row_ids`.
    Raises TypeError where they are no array, KeyMismatchError for what is no row of the key.
    """
    advice = "Make them with mx.nd.array(ids, dtype='int64')"
    if not isinstance(row_ids, NDArray):
        raise TypeError(f"row_ids of {called} have a {type(row_ids).__name__}. {advice}")
    dtype = np.dtype(row_ids.dtype)
    most = 0
    if dtype.kind in "iu":
        most = int(np.iinfo(dtype).max) + 1
    elif dtype.kind == "f":
        most = 2 ** (np.finfo(dtype).nmant + 1)
    if rows > most:
        raise KeyMismatchError(
            f"row_ids of {called} are of {dtype.name}, which numbers {most} rows and rounds larger "
            f"numbers or wraps them around, and {called} has {rows} rows. {advice}"
        )
    numbers = np.unique(row_ids.asnumpy())
    whole = numbers == np.rint(numbers)  # nan is not
    if not whole.all():
        raise KeyMismatchError(
            f"row_ids of {called} have {numbers[~whole][0]} ({dtype.name}), which is no whole "
            f"number. {advice}"
        )
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < rows:
        raise KeyMismatchError(
            f"row_ids are from {numbers[0]:.0f} to {numbers[-1]:.0f}, and {called} has the rows 0 "
            f"to {rows - 1}"
        )
    named: np.ndarray = numbers.astype(np.int64)
    return named


class _Held(NamedTuple):
    """A dense array that has a key's value."""

    array: NDArray
    rounds: Mapping[int, int]
    """By server: the round of the value."""
    writes: Optional[int]
    """How often the array has been written while it has the value; None if that is not known."""


class RowOperations:
    """Pushes and pulls keys of rows for a store. Calls come from the script's thread; operations
    start in any."""

    def __init__(
        self,
        begin: Callable[[Transfer], None],
        abort: Callable[[str], None],
        ready: Callable[[Key], None],
    ) -> None:
        """`begin` has the worker begin a transfer, `abort` has it end the job; `ready` is told of
        each gradient that is."""
        self._begin_transfer = begin
        self._abort = abort
        self._ready = ready
        self._held: Dict[Key, _Held] = {}
        """Arrays that pulls have written last. Only rows that have changed since travel."""

    def source(self, key: WorkerKey, arrays: Sequence[NDArray]) -> NDArray:
        """One row_sparse array on the CPU with the sum of `arrays`, one for each device. Raises
        KeyMismatchError for an array that is not what the key was declared with."""
        check_sources(key, arrays)
        local = [array.as_in_context(mx.cpu()) for array in arrays]
        return local[0] if len(local) == 1 else mx.nd.add_n(*local)

    def push(
        self,
        key: WorkerKey,
        round_: int,
        step: int,
        priority: int,
        source: NDArray,
        keeps_value: bool = False,
    ) -> None:
        """Pushes a row_sparse gradient, or the initial value, when it is ready. `keeps_value`: the
        array has the key's value from now on, as if it had been pulled."""
        pulls = key.pulls

        def start(operation: engine.Operation) -> None:
            if round_ != INITIAL_ROUND:
                self._ready(key.key)
            try:
                rows = self._rows_in(key, source)
            except KeyMismatchError as error:
                # Otherwise all workers would wait for this push.
                self._abort(str(error))
                operation.complete(error)
                return
            if keeps_value:
                rounds = dict.fromkeys(dict(key.runs), round_)
                self._held[key.key] = _Held(source, rounds, engine.writes(source))
            push = RowsPush(key, round_, step, rows, operation.complete)
            push.priority, push.after_pulls = priority, pulls
            self._begin_transfer(push)

        engine.push(start, [source], [], _PUSH)

    def push_no_gradient(
        self, key: WorkerKey, round_: int, step: int, priority: int, changes: Future[bool]
    ) -> None:
        """Has a round go on without a gradient of this worker; `changes` is told whether another
        had one."""
        pulls = key.pulls

        def start(operation: engine.Operation) -> None:
            push = RowsPush(key, round_, step, None, operation.complete)
            push.priority, push.after_pulls, push.changes = priority, pulls, changes
            self._begin_transfer(push)

        engine.push(start, [], [], _PUSH)

    def pull(self, key: WorkerKey, step: int, priority: int, target: NDArray) -> None:
        """Pulls the whole value into a dense array: all rows, or those that have changed."""
        key_round, number = key.round, key.next_pull()

        def start(operation: engine.Operation) -> None:
            elements, writes = _all_rows(key, target), engine.writes(target)
            held = self._held.pop(key.key, None)
            if held is not None and (
                held.array is not target or held.writes != writes or writes is None
            ):
                held = None  # the script has written into it, or may have

            def done(error: Optional[BaseException]) -> None:
                if error is None and writes is not None:
                    self._held[key.key] = _Held(target, pull.rounds, writes + 1)  # with ours
                operation.complete(error)

            pull = RowsPull(key, key_round, step, number, elements, done)
            pull.priority, pull.rounds = priority, {} if held is None else dict(held.rounds)
            self._begin_transfer(pull)

        engine.push(start, [], [target], _PULL)

    def pull_named(
        self, key: WorkerKey, step: int, priority: int, outs: Sequence[NDArray], row_ids: NDArray
    ) -> None:
        """Pulls the rows with these numbers, in any order, into row_sparse arrays; casts them where
        an array has another dtype."""
        if not key.touched_only:
            raise NotSupportedError(
                f"{key.called} was initialised with a dense value and a dense gradient, so it has "
                "no rows to pull. Initialise it with a row_sparse value, or call "
                "weight.attach_grad(stype='row_sparse') before, or use kv.pull"
            )
        check_fit(key.called, key.shape, None, outs, ROW_SPARSE)
        named = named_rows(key.called, key.shape[0], row_ids)
        if not len(named):
            spread(mx.nd.sparse.zeros(ROW_SPARSE, key.shape, dtype=key.dtype), outs)
            return
        fit = (out for out in outs if is_on_cpu(out) and dtype_name(out) == key.dtype)
        arrived = next(fit, None)
        if arrived is None:
            arrived = without_memory(key.shape, key.dtype)
        key_round, number = key.round, key.next_pull()

        def start(operation: engine.Operation) -> None:
            numbers, elements = give_rows(arrived, len(named))
            numbers[:] = named
            pull = RowsPull(key, key_round, step, number, elements, operation.complete)
            pull.priority, pull.named = priority, named
            self._begin_transfer(pull)

        engine.push(start, [], [arrived], _ROW_PULL)
        spread(arrived, outs)

    def _rows_in(self, key: WorkerKey, source: NDArray) -> Tuple[np.ndarray, np.ndarray]:
        """Numbers, which ascend, and elements; KeyMismatchError where they can't be right."""
        if source.stype != ROW_SPARSE:
            return np.arange(key.shape[0]), _all_rows(key, source)
        numbers, elements = rows_of(source)
        if (numbers[1:] <= numbers[:-1]).any():
            order = numbers.argsort(kind="stable")
            numbers, elements = numbers[order], elements[order]
        if len(numbers) and not (
            0 <= numbers[0] <= numbers[-1] < key.shape[0] and (numbers[1:] > numbers[:-1]).all()
        ):
            raise KeyMismatchError(
                f"a row_sparse array for {key.called} has a row twice, or others than 0 to "
                f"{key.shape[0] - 1}"
            )
        return numbers, elements


def _all_rows(key: WorkerKey, array: NDArray) -> np.ndarray:
    return elements_at(engine.address(array), key.numpy_dtype, key.shape[0], key.row_elems)
