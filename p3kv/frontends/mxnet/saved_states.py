"""Files of optimizer states: MXNet's own, which it pickles and unpickles itself on the worker."""

from __future__ import annotations

import copy
import os
import warnings
import zlib
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.errors import StatesError, in_one_line
from p3kv.frontends.mxnet import optimizer_settings
from p3kv.frontends.mxnet.arrays import dtype_name
from p3kv.frontends.mxnet.server_optimizer import as_mxnets, as_state
from p3kv.server.optimizer import State
from p3kv.wire.messages import Key, encode
from p3kv.wire.states import PlainState
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

_MOST_NAMED = 5


class Loaded(NamedTuple):
    """What a file has."""

    states: Dict[Key, Any]
    """MXNet's state of each key."""
    optimizer: Optional[mx.optimizer.Optimizer] = None
    updates: Optional[Dict[Key, int]] = None
    """How often the optimizer has updated each key of `states`; None without the optimizer."""
    steps: int = 0
    """How many updates the optimizer counts in all."""


def fetched(store: WorkerStore, keys: Sequence[WorkerKey]) -> Tuple[Dict[Key, Any], Dict[Key, int]]:
    """MXNet's states of keys, and how often each was updated, as the servers have them."""
    states, updates = {}, {}
    for key in keys:
        parts = [
            State(dict(part.elements), dict(part.numbers))
            for part in store.optimizer_state(key)
            if part is not None
        ]
        if parts:
            states[key.key], updates[key.key] = as_mxnets(State.joined(parts), _shape(key))
    return states, updates


def write(
    file: BinaryIO,
    optimizer: mx.optimizer.Optimizer,
    states: Dict[Key, Any],
    updates: Dict[Key, int],
    dump_optimizer: bool,
) -> None:
    """Writes states as MXNet does, the optimizer with them if it is to be dumped."""
    counting = copy.copy(optimizer)
    first = counting.begin_num_update
    counting._index_update_count = {key: first + count for key, count in updates.items()}
    counting._all_index_update_counts = {0: counting._index_update_count}
    updater = mx.optimizer.Updater(counting)
    updater.states = states
    file.write(updater.get_states(dump_optimizer))


def read(fname: str, current: mx.optimizer.Optimizer, keys: Sequence[WorkerKey]) -> Loaded:
    """Reads a file, and checks that a store with these keys and this optimizer can go on from it.

    Raises StatesError if it can't, and OSError if there is no such file.
    """
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
    _check_states(fname, states, optimizer, {key.key: key for key in keys})
    if optimizer is current:
        return Loaded(states)
    optimizer_settings.plain(optimizer, 0)  # the servers can run it
    first, counts = optimizer.begin_num_update, optimizer._index_update_count
    newest = max([optimizer.num_update, *counts.values()])
    updates = {key: counts.get(key, first) - first for key in states}
    return Loaded(states, optimizer, updates, newest - first)


def give(
    store: WorkerStore,
    keys: Sequence[WorkerKey],
    loaded: Loaded,
    updates: Dict[Key, int],
    since_step: int,
) -> None:
    """Gives the servers the states of a store's keys; keys that the file lacks begin anew."""
    for key in keys:
        parts: List[Optional[PlainState]] = [None] * len(key.runs)
        if key.key in loaded.states:
            whole = as_state(loaded.states[key.key], updates[key.key], since_step)
            cut = whole.cut([length for _, length in key.runs])
            parts = [PlainState(part.elements, part.numbers) for part in cut]
        store.load_optimizer_state(key, parts)


def digest(loaded: Loaded, updates: Dict[Key, int]) -> str:
    """A short name for all that must be the same on all workers."""
    counts = sorted((str(key), count) for key, count in updates.items())
    number = zlib.crc32(encode([loaded.optimizer is not None, loaded.steps, counts]))
    return f"{len(counts)} keys, {loaded.steps} steps, {number:08x}"


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


def _check_states(
    fname: str,
    states: Dict[Key, Any],
    optimizer: mx.optimizer.Optimizer,
    keys: Dict[Key, WorkerKey],
) -> None:
    unknown = [key for key in states if key not in keys]
    if unknown:
        raise StatesError(
            f"'{fname}' has states of {_named(unknown)}, and this store has {_named(list(keys))}; "
            "load it into the model that it was saved from, after the model's parameters have "
            "their shapes"
        )
    for key, state in states.items():
        known = keys[key]
        weight = mx.nd.zeros(_shape(known), dtype=known.dtype)
        with warnings.catch_warnings():
            # MXNet advises on float16; the training's own first step does so, too.
            warnings.simplefilter("ignore")
            expected = _outline(optimizer.create_state_multi_precision(key, weight))
        found = _outline(state)
        if found != expected:
            raise StatesError(
                f"'{fname}' has for {known.called} the state {found}, and "
                f"{type(optimizer).__name__} with these settings has {expected} for shape "
                f"{known.shape} and dtype {known.dtype}; use the model, the dtype and the "
                "optimizer that the file was saved with"
            )


def _outline(state: Any) -> str:
    """What a state is made of: "(float32 (3, 4), None)"."""
    if isinstance(state, tuple):
        return f"({', '.join(map(_outline, state))})"
    if isinstance(state, NDArray):
        sparse = "" if state.stype == "default" else f"{state.stype} "
        return f"{sparse}{dtype_name(state)} {tuple(state.shape)}"
    return "None" if state is None else type(state).__name__


def _named(keys: Sequence[Key]) -> str:
    """Keys in messages, the first few of many."""
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    names = ", ".join(repr(key) for key in keys[:_MOST_NAMED]) or "none"
    return ("key " if len(keys) == 1 else "keys ") + names + more


def _shape(key: WorkerKey) -> Tuple[int, ...]:
    return key.shape or (1,)
