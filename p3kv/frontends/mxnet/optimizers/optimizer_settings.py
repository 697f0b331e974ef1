"""An MXNet optimizer as plain data, so that a server can build the same one.

MXNet pickles optimizers, which lets the sender run code on the server, and loses the multipliers
of the parameters on the way. Here only names of classes that the server knows and plain values
travel. Learning rate schedulers stay on the worker, whose rate of each step is one of these values:
so any scheduler works, and it is called once for each update, in order.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple, Type, Union

import mxnet as mx
import numpy as np
from msgspec import field

from p3kv.errors import ConfigError, NotSupportedError, ProtocolError
from p3kv.frontends.mxnet import environment
from p3kv.frontends.mxnet.optimizers.sgd_after_momentum import SGDAfterMomentum
from p3kv.wire.messages import PLAIN_TYPES, Key, Message, check_plain, decode

# Each of these computes an element of the weight from the same element of gradient and state, and
# from numbers that the key's updates share.
_BY_SLICE = frozenset(
    {
        "AdaDelta", "AdaGrad", "Adam", "Adamax", "DCASGD", "FTML", "Ftrl", "NAG", "Nadam",
        "RMSProp", "SGD", "Signum", "Test", "ccSGD",
    }
)  # fmt: skip
# These need norms (LARS, LAMB, LBSGD) or means of rows (GroupAdaGrad). SGLD adds random numbers,
# which must not depend on the size of slices, or no run could be repeated.
_ON_WHOLE_TENSORS = frozenset({"GroupAdaGrad", "LAMB", "LARS", "LBSGD", "SGLD"})
# These have kernels for row_sparse gradients.
_BY_ROWS = frozenset({"AdaGrad", "Adam", "Ftrl", "GroupAdaGrad", "SGD", "ccSGD"})
_MXNETS: Dict[str, Type[mx.optimizer.Optimizer]] = {
    name: getattr(mx.optimizer, name, None) or getattr(mx.optimizer.contrib, name)
    for name in _BY_SLICE | _ON_WHOLE_TENSORS
}
_MXNETS[SGDAfterMomentum.__name__] = SGDAfterMomentum  # MXNet's but for what it leaves out
# What the server counts itself, and what is no plain data and used on the worker only.
_NOT_SENT = frozenset(
    {
        "_all_index_update_counts", "_index_update_count", "lr", "lr_scheduler", "num_update",
        "param_dict", "sym_info",
    }
)  # fmt: skip
_BEGUN_AFRESH: Dict[str, Dict[str, Any]] = {
    "LARS": {"cur_lr": None, "last_lr": None},
    "LBSGD": {"cumgrads": {}},
    "Nadam": {"m_schedule": 1.0},
}
"""By class: what updates change in the optimizer itself, and its value before the first."""
SHARED_NUMBERS = {"LARS": "cur_lr", "LBSGD": "lr", "Nadam": "m_schedule"}
"""By class: a number that one key's update may leave for the next key's. So it depends on the order
of updates, which is that of worker rank 0's pushes, and the worker sends it."""
KEPT_BY_KEY = {"LBSGD": "cumgrads"}
"""By class: a dict by key that is in fact state of the key."""


class PlainOptimizer(Message, frozen=True):
    """An optimizer of MXNet's: its class, its attributes and the parameters' multipliers."""

    name: str
    attributes: Dict[str, Any]
    rate: float
    multipliers: List[Tuple[Key, float, float]]
    """Key, lr_mult, wd_mult of each parameter that has them."""
    since_step: int
    """The store's step at which the optimizer was set; its own first one is the next."""
    counts_from: int
    """The step from which `num_update` counts. Later than `since_step` where other stores have
    stepped meanwhile, and the class may ask for it."""
    seed: Optional[int] = None
    """Seed of random numbers, together with the key and the count of its updates."""
    counts: List[Tuple[Key, int]] = field(default_factory=list)
    """Key, and the count of updates with which it begins, where that is not `begin_num_update`:
    the script's optimizer has trained before."""
    first_update: int = 0
    """The value of `num_update` at the step `counts_from`, if it is above `begin_num_update`."""

    def __post_init__(self) -> None:
        check_plain("an optimizer", self.attributes)


class SharedNumber(Message, frozen=True):
    """Number that a single update of a key has in place of one of the optimizer's attributes."""

    key: Key
    update: int
    """Number of the key's update with this optimizer, from 1."""
    since_step: int
    attribute: str
    value: float

    def __post_init__(self) -> None:
        if self.attribute not in SHARED_NUMBERS.values():
            raise ProtocolError(f"{self.attribute!r} is no number that updates share")


Settings = Union[PlainOptimizer, SharedNumber]


def is_mxnets(kind: Type[mx.optimizer.Optimizer]) -> bool:
    """Whether a class is MXNet's own and not a user's."""
    return _MXNETS.get(kind.__name__) is kind


def needs_whole_tensors(kind: Type[mx.optimizer.Optimizer]) -> bool:
    """Whether a class can't update slice by slice.

    A user's class says with `p3kv_by_slice = True` that it can: each element then follows from the
    same element of gradient, weight and state, whatever the shape.
    """
    if is_mxnets(kind):
        return kind.__name__ in _ON_WHOLE_TENSORS
    return not getattr(kind, "p3kv_by_slice", False)


def updates_rows(optimizer: mx.optimizer.Optimizer, sparse_weight: bool) -> bool:
    """Whether an update with a row_sparse gradient changes only the rows that the gradient has. As
    MXNet's kernels do; for any other optimizer MXNet makes the gradient dense."""
    kind = type(optimizer)
    if kind.__name__ not in _BY_ROWS or not is_mxnets(kind):
        return False
    if kind is mx.optimizer.Ftrl:
        return sparse_weight
    return bool(getattr(optimizer, "lazy_update", True))


def needs_sparse_weight(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether an update of a row_sparse weight has other numbers than that of a dense one. Kernels
    that update rows do the same to both, but not Ftrl's. Test fails on a sparse one."""
    if isinstance(optimizer, mx.optimizer.Test):
        return False
    return not updates_rows(optimizer, False)


def is_random(kind: Type[mx.optimizer.Optimizer]) -> bool:
    """Whether updates draw random numbers, or may."""
    return kind is mx.optimizer.SGLD or not is_mxnets(kind)


def plain(
    optimizer: mx.optimizer.Optimizer,
    since_step: int,
    seed: Optional[int] = None,
    other_steps: int = 0,
) -> PlainOptimizer:
    """The optimizer as it is now, the rate for its `num_update` included.

    `since_step` tells optimizers apart that were set one after the other. `other_steps`: how many
    steps of other stores there were since. Raises NotSupportedError for an optimizer that no server
    can build.
    """
    kind = type(optimizer)
    name = kind.__name__
    if not is_mxnets(kind):
        _check_registered(kind)
    left_out = _NOT_SENT.union(_BEGUN_AFRESH.get(name, ()))
    return PlainOptimizer(
        name=name,
        attributes={
            attribute: plain_value(value, f"{name}.{attribute}")
            for attribute, value in vars(optimizer).items()
            if attribute not in left_out
        },
        rate=float(optimizer.learning_rate),
        multipliers=[
            (index, float(parameter.lr_mult), float(parameter.wd_mult))
            for index, parameter in optimizer.param_dict.items()
        ],
        since_step=since_step,
        # MXNet's own classes ask for their `num_update` only where they have a scheduler.
        counts_from=since_step + (0 if is_mxnets(kind) else other_steps),
        seed=seed,
    )


def read(data: bytes) -> Settings:
    """Reads what a worker has written; raises ProtocolError for anything else."""
    settings: Settings = decode(data, Settings)
    return settings


def built(settings: PlainOptimizer) -> mx.optimizer.Optimizer:
    """The optimizer, before its first update. Raises ConfigError for a class that this process does
    not know, and ProtocolError for attributes with which no update can run."""
    kind = _known(settings.name)
    begun_afresh = _BEGUN_AFRESH.get(settings.name, {}) if is_mxnets(kind) else {}
    _check_attributes(kind, settings.attributes, begun_afresh)
    optimizer: mx.optimizer.Optimizer = object.__new__(kind)
    vars(optimizer).update(deepcopy({**settings.attributes, **begun_afresh}))
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
    return optimizer


def check_unchanged(optimizer: mx.optimizer.Optimizer, attributes: Dict[str, Any]) -> None:
    """Raises NotSupportedError where updates of a user's class have changed what all keys share."""
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        if attribute in _NOT_SENT:
            continue
        where = f"{name}.{attribute}"
        missing = object()
        if plain_value(value, where) != attributes.get(attribute, missing):
            raise NotSupportedError(
                f"an update has changed {where}, which all keys share. Each server updates only "
                "some of the keys, and not in the script's order. Keep such values in the state "
                f"that create_state returns, or {environment.WORKERS}"
            )


def plain_value(value: Any, where: str) -> Any:
    """The value as numbers, strs, lists and dicts; NotSupportedError for any other."""
    if type(value) in PLAIN_TYPES:  # nearly always, and each step asks
        return value
    if isinstance(value, np.generic):  # first: a numpy float64 is a float, too
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain_value(item, where) for item in value]
    if isinstance(value, dict):
        return {plain_value(key, where): plain_value(item, where) for key, item in value.items()}
    raise NotSupportedError(
        f"{where} is a {type(value).__name__}, which can't be sent to the servers; "
        f"use plain numbers and strings, or {environment.WORKERS}"
    )


def _check_registered(kind: Type[mx.optimizer.Optimizer]) -> None:
    name = kind.__name__
    if name in _MXNETS:
        raise NotSupportedError(
            f"the optimizer {name} of {kind.__module__} has the name of one of MXNet's own, which "
            f"the servers would take; give it another name, or {environment.WORKERS}"
        )
    if mx.optimizer.Optimizer.opt_registry.get(name.lower()) is not kind:
        raise NotSupportedError(
            f"the servers can't make the optimizer {name} of {kind.__module__}, which is not "
            "registered with MXNet. Define it in a module of its own, with "
            "@mx.optimizer.register, and set P3KV_OPTIMIZERS in the environment of every server to "
            f"the module's name; or {environment.WORKERS}"
        )


def _known(name: str) -> Type[mx.optimizer.Optimizer]:
    kind = _MXNETS.get(name) or mx.optimizer.Optimizer.opt_registry.get(name.lower())
    if kind is None or kind.__name__ != name:
        raise ConfigError(
            f"the servers know no optimizer {name!r}. Set P3KV_OPTIMIZERS, in the environment of "
            "every server, to the module that defines it and registers it with "
            "@mx.optimizer.register (not the script itself, since servers import the module); or "
            f"{environment.WORKERS}"
        )
    known: Type[mx.optimizer.Optimizer] = kind
    return known


def _check_attributes(
    kind: Type[mx.optimizer.Optimizer], attributes: Dict[str, Any], begun_afresh: Dict[str, Any]
) -> None:
    """Raises ProtocolError for attributes with which an update would fail or be another one."""
    mxnets = is_mxnets(kind)
    for name in attributes:
        # A user's class may have defaults of its attributes.
        if callable(getattr(kind, name, None)) or (mxnets and hasattr(kind, name)):
            raise ProtocolError(f"{kind.__name__}.{name} is no attribute that travels")
    # Of a user's class only what MXNet defines is known: its own arguments are not.
    for name, usual in vars(kind() if mxnets else mx.optimizer.Optimizer()).items():
        if name in _NOT_SENT or name in begun_afresh:
            continue
        value = attributes.get(name)
        kinds = type(usual) if isinstance(usual, (dict, str)) else (int, float)
        if not isinstance(value, kinds) and not (usual is None and name in attributes):
            raise ProtocolError(f"{kind.__name__}.{name} is {value!r}")
