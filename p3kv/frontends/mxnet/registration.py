"""Registers the store with MXNet, and prevents MXNet from silently using none or another one."""

from __future__ import annotations

import functools
from typing import Any, Set, Tuple

import mxnet as mx
from mxnet.kvstore import KVStoreBase

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import environment, trainer
from p3kv.frontends.mxnet.arrays import ROW_SPARSE
from p3kv.frontends.mxnet.checkpoints import leave_out, of_module
from p3kv.frontends.mxnet.environment import ASYNC_TYPE
from p3kv.frontends.mxnet.forward_order import FORWARD_READS
from p3kv.frontends.mxnet.store import P3
from p3kv.frontends.mxnet.stores import (
    NAMES,
    check_name,
    create_named,
    for_one_owner,
    is_ours,
    one_step,
)
from p3kv.frontends.mxnet.trial_stores import Other
from p3kv.worker import this_process


def register() -> None:
    """Registers the store under its names and corrects how MXNet chooses a store.

    `mxnet.model._create_kvstore` gives no store at all when there is one device and the name
    lacks 'dist'; the modules that call it have bound it by value.
    """
    for name, create in NAMES.items():
        KVStoreBase.kv_registry[name] = create
    for module in (mx.kvstore, mx.kvstore.base):
        module.create = _checked(module.create)
    for module in (mx.model, mx.gluon.trainer, mx.module.module):
        module._create_kvstore = _patched(module._create_kvstore, module is mx.gluon.trainer)
    for module in (mx.model, mx.gluon.trainer):
        module._create_sparse_kvstore = _patched_for_sparse(module._create_sparse_kvstore)
    trainer.patch()
    for module in (mx.model, mx.module.module):
        module._update_params_on_kvstore = _updating_in_one_step(module._update_params_on_kvstore)
    for name in ("set_config", "set_state", "dump", "pause", "resume"):
        setattr(mx.profiler, name, _on_workers(getattr(mx.profiler, name)))
    mx.model._train_multi_device = _naming_what_is_left_out(mx.model._train_multi_device)
    module_class = mx.module.Module
    module_class.init_optimizer = _telling_the_store(module_class.init_optimizer)
    FORWARD_READS.start()


def _on_workers(profile: Any) -> Any:
    """Has a function of MXNet's profiler say why it can't reach the servers. MXNet says that a
    handle is null."""

    @functools.wraps(profile)
    def on_workers(*arguments: Any, **more: Any) -> Any:
        if "server" in (*arguments, *more.values()) and this_process.is_worker():
            raise NotSupportedError(
                f"mx.profiler.{profile.__name__}(profile_process='server'): MXNet's profiler does "
                "not run on p3kv's servers; P3KV_TRACE writes a trace of every process"
            )
        return profile(*arguments, **more)

    return on_workers


def _checked(create: Any) -> Any:
    def checked(name: str = "local") -> KVStoreBase:
        check_name(name)
        store = create_named(name) if isinstance(name, str) else None
        return create(name) if store is None else store

    checked.__doc__ = create.__doc__
    return checked


def _patched(create_kvstore: Any, keys_are_places: bool) -> Any:
    """`keys_are_places`: gluon's Trainer uses a parameter's place as its key, others its name."""

    def create(kvstore: Any, num_device: int, arg_params: Any) -> Tuple[Any, bool]:
        if not is_ours(kvstore):
            check_name(kvstore)
            return create_kvstore(kvstore, num_device, arg_params)
        store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        if isinstance(store, Other):
            return create_kvstore(store, num_device, arg_params)
        store = for_one_owner(store)
        names = arg_params or ()
        store.name_keys(dict(enumerate(names)) if keys_are_places else {one: one for one in names})
        on_kvstore = store.type == ASYNC_TYPE or environment.update_on_kvstore_default()
        if isinstance(store, P3) and _row_sparse_gradients:
            if not on_kvstore:
                raise NotSupportedError(
                    f"the gradient of '{min(_row_sparse_gradients)}' is row_sparse, and workers "
                    "that update weights can't pull the sum of such gradients, in MXNet either. "
                    "Unset MXNET_UPDATE_ON_KVSTORE, so that the servers update"
                )
            store.expect_rows(_row_sparse_gradients)
        return store, on_kvstore

    return create


_row_sparse_gradients: Set[str] = set()
"""The parameters with row_sparse gradients of the Module that is about to create its store."""


def _telling_the_store(init_optimizer: Any) -> Any:
    """Has the store of a Module know which gradients are row_sparse, since their weights do not
    tell, and what has no gradients. Values of a checkpoint are in its executors afterwards."""

    @functools.wraps(init_optimizer)
    def telling(module: mx.module.Module, *arguments: Any, **more: Any) -> None:
        group = module._exec_group
        for name, gradients in zip(group.param_names, group.grad_arrays):
            if gradients and gradients[0] is not None and gradients[0].stype == ROW_SPARSE:
                _row_sparse_gradients.add(name)
        try:
            init_optimizer(module, *arguments, **more)
        finally:
            _row_sparse_gradients.clear()
        store = module._kvstore
        if isinstance(store, P3):
            store.keep_unpushed(lambda: of_module(module))
            module._params_dirty |= store.resumed_steps > 0

    return telling


def _naming_what_is_left_out(train: Any) -> Any:
    """Has FeedForward say that its auxiliary states are not in checkpoints."""

    @functools.wraps(train)
    def naming(
        symbol: Any, ctx: Any, arg_names: Any, param_names: Any, aux_names: Any, *arguments: Any,
        kvstore: Any, **more: Any,
    ) -> None:  # fmt: skip
        if isinstance(kvstore, P3) and kvstore.rank == 0:
            leave_out(aux_names)
        train(symbol, ctx, arg_names, param_names, aux_names, *arguments, kvstore=kvstore, **more)

    return naming


def _updating_in_one_step(update: Any) -> Any:
    """Makes an update one step, as for gluon's Trainer."""

    def update_params(params: Any, gradients: Any, kvstore: Any, names: Any) -> None:
        with one_step(kvstore):
            update(params, gradients, kvstore, names)

    return update_params


def _patched_for_sparse(create_sparse_kvstore: Any) -> Any:
    def create(kvstore: Any) -> Tuple[Any, bool]:
        if not is_ours(kvstore):
            check_name(kvstore)
            return create_sparse_kvstore(kvstore)
        store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        return store if isinstance(store, Other) else for_one_owner(store), True

    return create
