"""Registers the store with MXNet, and prevents MXNet from silently using none or another one."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from contextlib import nullcontext
from typing import Any, ContextManager, Optional, Set, Tuple

import mxnet as mx
from mxnet.kvstore import KVStoreBase

from p3kv import config
from p3kv.consistency import ASYNCHRONOUS
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.mxnet import environment
from p3kv.frontends.mxnet.alone import Alone
from p3kv.frontends.mxnet.arrays import ROW_SPARSE
from p3kv.frontends.mxnet.asynchronous import SYNC_TYPE, TYPE
from p3kv.frontends.mxnet.checkpoints import declare_now
from p3kv.frontends.mxnet.forward_order import FORWARD_READS
from p3kv.frontends.mxnet.store import P3
from p3kv.frontends.mxnet.trial_stores import Other
from p3kv.frontends.mxnet.trial_stores import store as store_of_a_trial
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")

_LOCAL = (
    "local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device", "nccl"
)  # fmt: skip
"""MXNet's own stores of one process. Any other name without 'dist' silently gives 'local'."""


def register() -> None:
    """Registers the store under its names and corrects how MXNet chooses a store.

    `mxnet.model._create_kvstore` gives no store at all when there is one device and the name
    lacks 'dist'; the modules that call it have bound it by value.
    """
    for name, create in _NAMES.items():
        KVStoreBase.kv_registry[name] = create
    for module in (mx.kvstore, mx.kvstore.base):
        module.create = _checked(module.create)
    for module in (mx.model, mx.gluon.trainer, mx.module.module):
        module._create_kvstore = _mended(module._create_kvstore, module is mx.gluon.trainer)
    for module in (mx.model, mx.gluon.trainer):
        module._create_sparse_kvstore = _mended_for_sparse(module._create_sparse_kvstore)
    # With sparse gradients the Trainer takes only stores of this class.
    mx.gluon.trainer.KVStore = (mx.kvstore.KVStore, P3)
    trainer = mx.gluon.Trainer
    trainer._check_and_rescale_grad = _rescaled(trainer._check_and_rescale_grad)
    trainer._reset_kvstore = _saying_how(trainer._reset_kvstore)
    parameter = mx.gluon.Parameter
    parameter.initialize = _known_to_the_trainer(parameter.initialize)
    trainer.__init__ = _noting(trainer.__init__)
    trainer._allreduce_grads = _pushing_one_step(_refusing_scaled_losses(trainer._allreduce_grads))
    for module in (mx.model, mx.module.module):
        module._update_params_on_kvstore = _updating_in_one_step(module._update_params_on_kvstore)
    for name in ("set_config", "set_state", "dump", "pause", "resume"):
        setattr(mx.profiler, name, _on_workers(getattr(mx.profiler, name)))
    module_class = mx.module.Module
    module_class.init_optimizer = _telling_of_rows(module_class.init_optimizer)
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


def _create() -> KVStoreBase:
    trial = config.trial()
    if trial is not None:
        return store_of_a_trial(trial, asynchronous=False)
    return P3() if _in_a_job() else Alone(SYNC_TYPE)


def _create_asynchronous() -> KVStoreBase:
    trial = config.trial()
    if trial is not None:
        return store_of_a_trial(trial, asynchronous=True)
    return P3(ASYNCHRONOUS) if _in_a_job() else Alone(TYPE)


_NAMES = {"p3": _create, SYNC_TYPE: _create, TYPE: _create_asynchronous}


def _in_a_job() -> bool:
    return this_process.is_worker() or config.Launch.from_environment() is not None


def _checked(create: Any) -> Any:
    def checked(name: str = "local") -> KVStoreBase:
        _check_name(name)
        return create(name)

    checked.__doc__ = create.__doc__
    return checked


def _mended(create_kvstore: Any, keys_are_places: bool) -> Any:
    """`keys_are_places`: gluon's Trainer uses a parameter's place as its key, others its name."""

    def create(kvstore: Any, num_device: int, arg_params: Any) -> Tuple[Any, bool]:
        if not _is_ours(kvstore):
            _check_name(kvstore)
            return create_kvstore(kvstore, num_device, arg_params)
        store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        names = arg_params or ()
        if isinstance(store, Other):
            return create_kvstore(store, num_device, arg_params)
        keys = dict(enumerate(names)) if keys_are_places else {name: name for name in names}
        if store.has_any(keys):
            # Another Trainer, or Module, has the store already: this one gets its own.
            given, store = store, _NAMES[store.type]()
            if given.compression_params is not None:
                store.set_gradient_compression(given.compression_params)
            if given.max_norm is not None:
                store.clip_global_norm(given.max_norm)
        store.name_keys(keys)
        on_kvstore = store.type == TYPE or environment.update_on_kvstore_default()
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


def _telling_of_rows(init_optimizer: Any) -> Any:
    """Has the store of a Module know which gradients are row_sparse: their weights do not tell."""

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

    return telling


def _noting(init: Any) -> Any:
    """Has every new Trainer learn its forward order, also when others have learned theirs; and
    declare its keys where there are checkpoints."""

    @functools.wraps(init)
    def noting(trainer: mx.gluon.Trainer, *arguments: Any, **more: Any) -> None:
        init(trainer, *arguments, **more)
        if _is_ours(trainer._kvstore_params["kvstore"]):
            FORWARD_READS.start()
            if _in_a_job() and config.current().checkpoint_dir is not None:
                declare_now(trainer)

    return noting


def _pushing_one_step(allreduce_grads: Any) -> Any:
    """Says what a step's pushes are, which `clip_global_norm` must know."""

    def allreduce(trainer: mx.gluon.Trainer) -> None:
        with _one_step(trainer._kvstore):
            allreduce_grads(trainer)

    return allreduce


def _refusing_scaled_losses(allreduce_grads: Any) -> Any:
    """Refuses a loss that is scaled where servers update. MXNet's scaler looks at a worker's own
    gradients then, after the update: infinity would be in the weights, and where workers change
    their scales at different steps, their gradients would not count alike."""

    def allreduce(trainer: mx.gluon.Trainer) -> None:
        scaled = getattr(trainer, "_amp_loss_scaler", None) is not None
        if scaled and trainer._update_on_kvstore and isinstance(trainer._kvstore, (P3, Alone)):
            raise NotSupportedError(
                "this Trainer is one of amp.init_trainer, whose loss scaling has to see the sum of "
                "all workers' gradients before weights are updated, and with kvstore='p3' servers "
                "update them. Write update_on_kvstore=False in Trainer"
            )
        allreduce_grads(trainer)

    return allreduce


def _updating_in_one_step(update: Any) -> Any:
    """As for gluon's Trainer."""

    def update_params(params: Any, gradients: Any, kvstore: Any, names: Any) -> None:
        with _one_step(kvstore):
            update(params, gradients, kvstore, names)

    return update_params


def _one_step(store: Any) -> ContextManager[None]:
    return store.one_step() if isinstance(store, (P3, Alone)) else nullcontext()


def _rescaled(check_and_rescale_grad: Any) -> Any:
    """Allows a Trainer another batch size at any step.

    MXNet refuses it where a distributed store updates, because its own servers never learn of it.
    """

    def rescale(trainer: mx.gluon.Trainer, scale: float) -> None:
        if isinstance(trainer._kvstore, (P3, Alone, Other)):
            trainer._optimizer.rescale_grad = scale
        else:
            check_and_rescale_grad(trainer, scale)

    return rescale


def _saying_how(reset_kvstore: Any) -> Any:
    """Has a Trainer say how weights are changed. MXNet says that it can't reset the store, where
    it would have to, because servers keep the weights."""

    def reset(trainer: mx.gluon.Trainer) -> None:
        if isinstance(trainer._kvstore, (P3, Alone)):
            raise NotSupportedError(
                "with kvstore='p3' servers keep a Trainer's weights from its first step on, so a "
                "script can't change them. Write update_on_kvstore=False in Trainer, or change "
                "them after you have made a new Trainer"
            )
        reset_kvstore(trainer)

    return reset


def _known_to_the_trainer(initialize: Any) -> Any:
    """Treats a parameter that is initialised once more as MXNet treats one whose data is set. Else
    the next step would bring the old weight back."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def known(parameter: mx.gluon.Parameter, *arguments: Any, **more: Any) -> None:
        again = signature.bind(parameter, *arguments, **more).arguments.get("force_reinit")
        if again and _servers_keep(parameter):
            parameter._trainer._reset_kvstore()
        initialize(parameter, *arguments, **more)

    return known


def _servers_keep(parameter: mx.gluon.Parameter) -> bool:
    trainer = parameter._trainer
    return (
        trainer is not None
        and isinstance(trainer._kvstore, (P3, Alone))
        and bool(trainer._update_on_kvstore)
        and parameter not in trainer._params_to_init
    )


def _mended_for_sparse(create_sparse_kvstore: Any) -> Any:
    def create(kvstore: Any) -> Tuple[Any, bool]:
        if not _is_ours(kvstore):
            _check_name(kvstore)
            return create_sparse_kvstore(kvstore)
        store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        if isinstance(store, P3) and store.has_keys:
            # MXNet does not say which keys follow; they may be there already.
            store = type(store)()
        return store, True

    return create


def _is_ours(kvstore: Any) -> bool:
    return isinstance(kvstore, (P3, Alone, Other)) or (
        isinstance(kvstore, str) and kvstore.lower() in _NAMES
    )


def _check_name(kvstore: Optional[Any]) -> None:
    """Says what another store than p3 means here.

    `kvstore` is a name, None for no store or a store. Raises ConfigError for a name that MXNet
    does not know, and in a p3kv job for its own distributed stores, which would wait for ever.
    """
    name = kvstore.lower() if isinstance(kvstore, str) else None
    if name in _NAMES:
        return
    if name is not None and "dist" in name:
        if this_process.is_worker():
            raise ConfigError(
                f"kvstore='{kvstore}' is MXNet's own store, and the servers of this job are "
                "p3kv's. Write kvstore='p3', or start the job without p3kv."
            )
    elif name is not None and name not in (*_LOCAL, *KVStoreBase.kv_registry):
        nearest = difflib.get_close_matches(name, (*_NAMES, *_LOCAL, "dist_sync", "dist_async"), 1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else "p3kv's is 'p3'"
        raise ConfigError(f"MXNet has no kvstore '{kvstore}' and would use 'local'; {hint}")
    elif name is not None or kvstore is None:
        this_process.trains_alone(f"with kvstore={kvstore!r}")
