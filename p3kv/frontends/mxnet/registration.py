"""Makes MXNet know the store, and use it where it would silently use none."""

from __future__ import annotations

from typing import Any, Mapping, Tuple

import mxnet as mx
from mxnet.kvstore import KVStoreBase

from p3kv import config
from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet.forward_order import FORWARD_READS
from p3kv.frontends.mxnet.store import P3

_NAMES = ("p3", "dist_sync_p3")


def register() -> None:
    """Registers the store under its names and mends MXNet's way of choosing a store.

    `mxnet.model._create_kvstore` gives no store at all when there is one device and the name
    lacks 'dist'; the modules that call it have bound it by value.
    """
    for name in _NAMES:
        KVStoreBase.kv_registry[name] = P3
    for module in (mx.model, mx.gluon.trainer, mx.module.module):
        module._create_kvstore = _mended(module._create_kvstore)
    for module in (mx.model, mx.gluon.trainer):
        module._create_sparse_kvstore = _mended_for_sparse(module._create_sparse_kvstore)
    FORWARD_READS.start()


def _mended(create_kvstore: Any) -> Any:
    def create(kvstore: Any, num_device: int, arg_params: Any) -> Tuple[Any, bool]:
        if not _is_ours(kvstore):
            return create_kvstore(kvstore, num_device, arg_params)
        _refuse_sparse(arg_params)
        store = mx.kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        return store, config.update_on_kvstore_default()

    return create


def _mended_for_sparse(create_sparse_kvstore: Any) -> Any:
    def create(kvstore: Any) -> Tuple[Any, bool]:
        if not _is_ours(kvstore):
            return create_sparse_kvstore(kvstore)
        raise _not_supported("a parameter's weight is sparse (row_sparse)")

    return create


def _is_ours(kvstore: Any) -> bool:
    return isinstance(kvstore, P3) or (isinstance(kvstore, str) and kvstore.lower() in _NAMES)


def _refuse_sparse(arrays: Mapping[str, mx.nd.NDArray]) -> None:
    """Before MXNet does, which would not say what to do."""
    for name, array in (arrays or {}).items():
        if array.stype != "default":
            raise _not_supported(f"the weight of '{name}' is sparse ({array.stype})")
        if array.grad is not None and array.grad.stype != "default":
            raise _not_supported(f"the gradient of '{name}' is sparse ({array.grad.stype})")


def _not_supported(what: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what}, which is not built yet; use dense parameters and gradients, such as "
        "gluon.nn.Embedding(..., sparse_grad=False), or kvstore='dist_sync'"
    )
