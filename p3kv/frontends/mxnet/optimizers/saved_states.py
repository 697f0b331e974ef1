"""Files of optimizer states: MXNet's own, which it pickles and unpickles itself on the worker."""

from __future__ import annotations

import copy
import os
import warnings
import zlib
from contextlib import contextmanager, suppress
from typing import (
    Any,
    BinaryIO,
    Dict,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.errors import StatesError, in_one_line
from p3kv.frontends.mxnet.arrays import DENSE, ROW_SPARSE, dtype_name
from p3kv.frontends.mxnet.optimizers.optimizer_settings import needs_sparse_weight
from p3kv.frontends.mxnet.optimizers.plain_states import OfKey, as_mxnets, as_state, with_all_rows
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer, take_remembered
from p3kv.server.optimizer import State
from p3kv.store.states import give_state, states_of
from p3kv.wire.messages import Key, all_called, encode
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


def begun(optimizer: mx.optimizer.Optimizer, key: WorkerKey) -> Any:
    """The state with which MXNet begins for a key's weight, dense or row_sparse."""
    return _begun(optimizer, key, ROW_SPARSE if _is_sparse(key) else DENSE)


def as_in_files(optimizer: mx.optimizer.Optimizer, key: WorkerKey, state: Any) -> Any:
    """A key's state on the servers, with arrays stored as MXNet stores them."""
    if not _is_sparse(key) or needs_sparse_weight(optimizer):
        return state
    return _stored_as(state, _begun(optimizer, key, ROW_SPARSE))


def as_on_servers(optimizer: mx.optimizer.Optimizer, key: WorkerKey, state: Any) -> Any:
    """A key's state of MXNet's, with arrays stored as the servers' optimizer has them."""
    if not _is_sparse(key) or needs_sparse_weight(optimizer):
        return state
    return _stored_as(state, _begun(optimizer, key, DENSE))


def _is_sparse(key: WorkerKey) -> bool:
    return key.declared.layout == "sparse_rows"


def _begun(optimizer: mx.optimizer.Optimizer, key: WorkerKey, stype: str) -> Any:
    weight = mx.nd.zeros(key.shape or (1,), dtype=key.dtype, stype=stype)
    with warnings.catch_warnings():
        # MXNet advises on float16; the training's own first step does so, too.
        warnings.simplefilter("ignore")
        return optimizer.create_state_multi_precision(key.key, weight)


def _stored_as(state: Any, like: Any) -> Any:
    """`state` with arrays that are stored as those of `like`, which has the same structure. MXNet's
    own optimizers have arrays and tuples of them."""
    if isinstance(state, tuple):
        return tuple(_stored_as(part, its) for part, its in zip(state, like))
    if isinstance(state, NDArray) and state.stype != like.stype:
        return with_all_rows(state.asnumpy()) if like.stype == ROW_SPARSE else state.tostype(DENSE)
    return state


class Loaded(NamedTuple):
    """Contents of a file."""

    states: Dict[Key, Any]
    """MXNet's state of each key."""
    optimizer: Optional[mx.optimizer.Optimizer] = None
    updates: Optional[Dict[Key, int]] = None
    """How often the optimizer has updated each key of `states`; None without the optimizer."""
    steps: int = 0
    """How many updates the optimizer counts in all."""
    remembered: Mapping[str, Any] = {}
    """Values that the optimizer remembers for all keys together."""
    kept: Mapping[Key, Any] = {}
    """Values that it keeps in itself for some of the keys."""


def fetched(
    store: WorkerStore, keys: Sequence[WorkerKey], optimizer: WorkerOptimizer
) -> Dict[Key, OfKey]:
    """Fetches what the servers' optimizer remembers of keys."""
    whole = optimizer.needs_whole_tensors
    found = {key: states_of(store, key, whole) for key in keys}
    return {key.key: of_states(of_key, key, optimizer) for key, of_key in found.items() if of_key}


def of_states(of_servers: Sequence[State], key: WorkerKey, optimizer: WorkerOptimizer) -> OfKey:
    """Joins what the servers' optimizer remembers of a key, from the states of all its servers, in
    the order of the elements."""
    whole = optimizer.needs_whole_tensors
    state = of_servers[0] if whole else State.joined(of_servers)
    of_key = as_mxnets(state, _shape(key), whole)
    return of_key._replace(state=as_in_files(optimizer.optimizer, key, of_key.state))


def write(
    file: BinaryIO, optimizer: WorkerOptimizer, of_keys: Dict[Key, OfKey], dump_optimizer: bool
) -> None:
    """Writes states as MXNet does, the optimizer with them if it is to be dumped."""
    counting = copy.copy(optimizer.optimizer)
    counts = {key: optimizer.count_before(key) + of_key.updates for key, of_key in of_keys.items()}
    counting._index_update_count = counts
    counting._all_index_update_counts = {0: counts}
    vars(counting).update(optimizer.remembered())
    if optimizer.kept_by_key is not None:
        kept = {key: of_key.kept for key, of_key in of_keys.items() if of_key.kept is not None}
        setattr(counting, optimizer.kept_by_key, kept)
    updater = mx.optimizer.Updater(counting)
    updater.states = {key: of_key.state for key, of_key in of_keys.items()}
    file.write(updater.get_states(dump_optimizer))


def read(fname: str, current: mx.optimizer.Optimizer, keys: Sequence[WorkerKey]) -> Loaded:
    """Reads a file, and checks that a store with these keys and this optimizer can go on from it.
    Raises StatesError if it can't, and OSError if there is no such file."""
    with open(fname, "rb") as file:
        data = file.read()
    updater = mx.optimizer.Updater(current)
    try:
        updater.set_states(data)
    except Exception as error:
        raise StatesError(
            f"'{fname}' is no file of optimizer states ({in_one_line(error)}); give one that "
            "trainer.save_states or kv.save_optimizer_states has written"
        ) from error
    states, optimizer = updater.states, updater.optimizer
    if not isinstance(states, dict) or not isinstance(optimizer, mx.optimizer.Optimizer):
        raise StatesError(
            f"'{fname}' is no file of optimizer states; give one that trainer.save_states or "
            "kv.save_optimizer_states has written"
        )
    if type(optimizer) is not type(current):
        raise StatesError(
            f"'{fname}' is of the optimizer {type(optimizer).__name__}, and this training has "
            f"{type(current).__name__}; train with the file's optimizer, or without the file"
        )
    check(f"'{fname}'", states, optimizer, keys)
    if optimizer is current:
        return Loaded(states)
    remembered = take_remembered(optimizer)
    settings = WorkerOptimizer(optimizer, 0, remembered)  # the servers can run it
    kept = getattr(optimizer, settings.kept_by_key) if settings.kept_by_key else {}
    first, counts = optimizer.begin_num_update, optimizer._index_update_count
    newest = max([optimizer.num_update, *counts.values()])
    updates = {key: counts.get(key, first) - first for key in states}
    _check_kept(fname, kept, {key.key: key for key in keys})
    return Loaded(states, optimizer, updates, newest - first, remembered, kept)


def give(
    store: WorkerStore,
    keys: Sequence[WorkerKey],
    of_keys: Mapping[Key, OfKey],
    optimizer: WorkerOptimizer,
) -> None:
    """Gives the servers' optimizer what it is to remember of a store's keys; keys that are not in
    `of_keys` begin anew."""
    whole = optimizer.needs_whole_tensors
    for key in keys:
        of_key, state = of_keys.get(key.key), None
        if of_key is not None:
            stored = as_on_servers(optimizer.optimizer, key, of_key.state)
            state = as_state(of_key._replace(state=stored), optimizer.since_step, whole)
        give_state(store, key, state, whole)


def digest(loaded: Loaded, updates: Dict[Key, int]) -> str:
    """A short name for all that must be the same on all workers."""
    counts = sorted((str(key), count) for key, count in updates.items())
    number = zlib.crc32(encode([loaded.optimizer is not None, loaded.steps, counts]))
    return f"{len(counts)} keys, {loaded.steps} steps, {number:08x}"


def check(
    what: str,
    states: Dict[Key, Any],
    optimizer: mx.optimizer.Optimizer,
    declared: Sequence[WorkerKey],
) -> None:
    """Raises StatesError unless states are those of these keys and this optimizer; `what` names
    where they are from."""
    keys = {key.key: key for key in declared}
    unknown = [key for key in states if key not in keys]
    if unknown:
        raise StatesError(
            f"{what} has states of {all_called(unknown)}, and this store has "
            f"{all_called(list(keys))}; load it into the model that it was saved from, after the "
            "model's parameters have their shapes"
        )
    for key, state in states.items():
        known = keys[key]
        expected, found = _outline(begun(optimizer, known)), _outline(state)
        if found != expected:
            raise StatesError(
                f"{what} has for {known.called} the state {found}, and "
                f"{type(optimizer).__name__} with these settings has {expected} for shape "
                f"{known.shape} and dtype {known.dtype}; use the model, the dtype and the "
                "optimizer with which it was saved"
            )


@contextmanager
def replacing(fname: str, rank: int) -> Iterator[BinaryIO]:
    """A new file that takes the place of `fname` when all is written; OSError if it can't."""
    path = os.path.realpath(fname)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as device:
            yield device
        return
    part = f"{path}.{rank}-{os.getpid()}"
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def _check_kept(fname: str, kept: Mapping[Key, Any], keys: Dict[Key, WorkerKey]) -> None:
    """LBSGD keeps gradients of several steps in a dict, or the number 0."""
    for key, values in kept.items():
        for value in values.values():
            shape = _shape(keys[key]) if key in keys else None
            if isinstance(value, NDArray) and tuple(value.shape) != shape:
                of = keys[key].called if key in keys else f"key {key!r}"
                raise StatesError(
                    f"'{fname}' has a gradient of shape {tuple(value.shape)} for {of}, and this "
                    f"training has {shape}; load it into the model that it was saved from"
                )


def _outline(state: Any) -> str:
    """Structure of a state: "(float32 (3, 4), None)"."""
    if isinstance(state, tuple):
        return f"({', '.join(map(_outline, state))})"
    if isinstance(state, list):
        return f"[{', '.join(map(_outline, state))}]"
    if isinstance(state, dict):
        return f"{{{', '.join(f'{name!r}: {_outline(part)}' for name, part in state.items())}}}"
    if isinstance(state, NDArray):
        sparse = "" if state.stype == "default" else f"{state.stype} "
        return f"{sparse}{dtype_name(state)} {tuple(state.shape)}"
    return "None" if state is None else type(state).__name__


def _shape(key: WorkerKey) -> Tuple[int, ...]:
    return key.shape or (1,)
