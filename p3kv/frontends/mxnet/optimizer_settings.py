"""An MXNet optimizer as plain data, so that a server can build the same one.

MXNet pickles optimizers, which lets the sender run code on the server, and loses the multipliers
of the parameters on the way. Here only names of MXNet's own classes and plain values travel.
Learning rate schedulers stay on the worker, whose rate of each step is one of these values: so
any scheduler works, and it is called once for each update, in order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np

from p3kv.errors import NotSupportedError, ProtocolError
from p3kv.wire.messages import Key, Message, decode, encode

# Each of these computes an element of the weight from the same element of gradient and state.
_ELEMENTWISE = frozenset(
    {
        "AdaDelta", "AdaGrad", "Adam", "Adamax", "DCASGD", "FTML", "Ftrl", "NAG", "RMSProp",
        "SGD", "Signum", "Test", "ccSGD",
    }
)  # fmt: skip
# What the server counts itself, and what is no plain data and used on the worker only.
_NOT_SENT = frozenset(
    {
        "_all_index_update_counts", "_index_update_count", "lr", "lr_scheduler", "num_update",
        "param_dict", "sym_info",
    }
)  # fmt: skip


class PlainOptimizer(Message, frozen=True):
    """An optimizer of MXNet's: its class, its attributes and the parameters' multipliers."""

    name: str
    attributes: Dict[str, Any]
    rate: float
    multipliers: List[Tuple[Key, float, float]]
    """Key, lr_mult, wd_mult of each parameter that has them."""
    since_step: int
    """The store's step at which the optimizer was set; its own first one is the next."""


def to_bytes(optimizer: mx.optimizer.Optimizer, since_step: int) -> bytes:
    """The optimizer's settings as they are now, the rate for its `num_update` among them; equal
    settings give equal bytes.

    `since_step` tells optimizers apart that were set one after the other. Raises
    NotSupportedError for an optimizer that the servers can't run slice by slice.
    """
    name = type(optimizer).__name__
    if name not in _ELEMENTWISE or type(optimizer) is not getattr(mx.optimizer, name, None):
        raise NotSupportedError(
            f"the servers can't run the optimizer {name} slice by slice: it is not one of "
            f"{', '.join(sorted(_ELEMENTWISE))}. Run it on the workers, with "
            "gluon.Trainer(..., update_on_kvstore=False) or MXNET_UPDATE_ON_KVSTORE=0."
        )
    settings = PlainOptimizer(
        name=name,
        attributes={
            attribute: _plain(value, f"{name}.{attribute}")
            for attribute, value in vars(optimizer).items()
            if attribute not in _NOT_SENT
        },
        rate=float(optimizer.learning_rate),
        multipliers=[
            (index, float(parameter.lr_mult), float(parameter.wd_mult))
            for index, parameter in optimizer.param_dict.items()
        ],
        since_step=since_step,
    )
    return encode(settings)


def from_bytes(data: bytes) -> Tuple[mx.optimizer.Optimizer, int]:
    """Builds the optimizer; returns it and `since_step`.

    Raises ProtocolError for data that `to_bytes` does not make.
    """
    settings: PlainOptimizer = decode(data, PlainOptimizer)
    if settings.name not in _ELEMENTWISE:
        raise ProtocolError(f"'{settings.name}' is no optimizer that a server runs")
    kind = getattr(mx.optimizer, settings.name)
    _check_attributes(kind, settings.attributes)
    optimizer = kind.__new__(kind)
    vars(optimizer).update(settings.attributes)
    optimizer.lr = settings.rate
    optimizer.lr_scheduler = None
    optimizer.num_update = optimizer.begin_num_update
    optimizer._all_index_update_counts = {0: {}}
    optimizer._index_update_count = optimizer._all_index_update_counts[0]
    optimizer.sym_info = ()
    optimizer.param_dict = {
        key: SimpleNamespace(lr_mult=lr_mult, wd_mult=wd_mult)
        for key, lr_mult, wd_mult in settings.multipliers
    }
    return optimizer, settings.since_step


def _check_attributes(kind: Any, attributes: Dict[str, Any]) -> None:
    """Raises ProtocolError for attributes with which an update would fail or be another one."""
    for name in attributes:
        if hasattr(kind, name):
            raise ProtocolError(f"{kind.__name__}.{name} is no attribute that travels")
    for name, usual in vars(kind()).items():
        if name in _NOT_SENT:
            continue
        value = attributes.get(name)
        kinds = type(usual) if isinstance(usual, dict) else (int, float)
        if not isinstance(value, kinds) and not (usual is None and name in attributes):
            raise ProtocolError(f"{kind.__name__}.{name} is {value!r}")


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):  # first: a numpy float64 is a float, too
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if isinstance(value, dict):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    raise NotSupportedError(
        f"{where} is a {type(value).__name__}, which can't be sent to the servers; "
        "use plain numbers and strings, or update_on_kvstore=False"
    )
