"""p3kv's stores: their names, and what another name than theirs means."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ContextManager, Optional, Union

from mxnet.kvstore import KVStoreBase

from p3kv import config
from p3kv.common.words import did_you_mean
from p3kv.consistency import ASYNCHRONOUS
from p3kv.errors import ConfigError
from p3kv.frontends.mxnet.alone import Alone
from p3kv.frontends.mxnet.environment import ASYNC_TYPE, SYNC_TYPE
from p3kv.frontends.mxnet.store import P3
from p3kv.frontends.mxnet.trial_stores import Other
from p3kv.frontends.mxnet.trial_stores import store as store_of_a_trial
from p3kv.store.checks import check_choices_alone
from p3kv.worker import this_process

_LOCAL = (
    "local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device", "nccl"
)  # fmt: skip
"""MXNet's own stores of one process. Any other name without 'dist' silently gives 'local'."""


def _create(consistency: Optional[str] = None) -> KVStoreBase:
    """Makes a store; `consistency` chooses its rule, if that is not the job's."""
    trial = config.trial()
    if trial is not None:
        return store_of_a_trial(trial, consistency)
    if this_process.joined():
        return P3(consistency)
    check_choices_alone(consistency)
    return Alone(consistency)


NAMES = {"p3": _create, SYNC_TYPE: _create, ASYNC_TYPE: partial(_create, ASYNCHRONOUS)}
"""Functions that make a store, by its name."""


def create_named(kvstore: str) -> Optional[KVStoreBase]:
    """The store of a name with a rule, such as 'p3:delayed:staleness=1'; None for other names.
    Raises ConfigError for a rule that there is not, or that contradicts the name."""
    name, colon, consistency = kvstore.partition(":")
    name = name.lower()
    if not colon or name not in NAMES:
        return None
    if name == ASYNC_TYPE:
        raise ConfigError(
            f"kvstore='{kvstore}' has two rules: write kvstore='p3:{consistency}', or "
            f"'{ASYNC_TYPE}'"
        )
    return _create(consistency)


def is_ours(kvstore: Any) -> bool:
    """Whether a store, or the store of a name, is p3kv's or stands for it in a comparison."""
    return isinstance(kvstore, (P3, Alone, Other)) or (
        isinstance(kvstore, str) and kvstore.partition(":")[0].lower() in NAMES
    )


def for_one_owner(given: Union[P3, Alone]) -> Union[P3, Alone]:
    """The store for a Trainer, Module or part of one that was given this store: it brings an
    optimizer, which must not take the place of another's, nor update another's keys.

    So whoever comes first gets the store itself, if nobody has used it. Others get a new one with
    the same choices.
    """
    if not given.is_taken:
        return given
    store = _create(given.consistency)
    assert isinstance(store, (P3, Alone)), "a trial's has no such owner"
    if given.compression_params is not None:
        store.set_gradient_compression(given.compression_params)
    if given.max_norm is not None:
        store.clip_global_norm(given.max_norm)
    return store


def one_step(store: Any) -> ContextManager[None]:
    """While entered, all pushes to the store belong to one step; nothing for others' stores."""
    return store.one_step() if isinstance(store, (P3, Alone)) else nullcontext()


def check_name(kvstore: Optional[Any]) -> None:
    """Says what another store than p3 means here.

    `kvstore` is a name, None for no store or a store. Raises ConfigError for a name that MXNet
    does not know, and in a p3kv job for its own distributed stores, which would wait for ever.
    """
    name = kvstore.lower() if isinstance(kvstore, str) else None
    if is_ours(kvstore):
        return
    if name is not None and "dist" in name:
        meant = did_you_mean(name, NAMES) if "p3" in name else ""
        if meant:
            raise ConfigError(f"there is no kvstore '{kvstore}'{meant}")
        if this_process.is_worker():
            raise ConfigError(
                f"kvstore='{kvstore}' is MXNet's own store, and the servers of this job are "
                "p3kv's. Write kvstore='p3', or start the job without p3kv."
            )
    elif name is not None and name not in (*_LOCAL, *KVStoreBase.kv_registry):
        known = (*NAMES, *_LOCAL, "dist_sync", "dist_async")
        hint = did_you_mean(name, known) or "; p3kv's is 'p3'"
        raise ConfigError(f"MXNet has no kvstore '{kvstore}' and would use 'local'{hint}")
    elif name is not None or kvstore is None:
        this_process.trains_alone(f"with kvstore={kvstore!r}")
