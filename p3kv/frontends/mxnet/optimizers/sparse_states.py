"""Optimizer states of row_sparse weights, whose arrays may be row_sparse, too.

On servers most optimizers see such a weight as a dense array, so their states are dense
(`optimizer_settings.needs_sparse_weight`). MXNet's files have the states of the weight as it is.
"""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet.arrays import DENSE, ROW_SPARSE
from p3kv.frontends.mxnet.optimizers.optimizer_settings import needs_sparse_weight
from p3kv.frontends.mxnet.optimizers.plain_states import with_all_rows
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
    """`state` with arrays that are stored as those of `like`, which has the same structure.

    MXNet's own optimizers have arrays and tuples of them.
    """
    if isinstance(state, tuple):
        return tuple(_stored_as(part, its) for part, its in zip(state, like))
    if isinstance(state, NDArray) and state.stype != like.stype:
        return with_all_rows(state.asnumpy()) if like.stype == ROW_SPARSE else state.tostype(DENSE)
    return state
