"""An optimizer of torch's as plain data, so that a server can make the same one.

Only names of classes that the server knows and plain values travel. Schedulers stay on the worker:
they change `param_groups`, which travel with each step in which they differ.
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Optional, Tuple, Type

import numpy as np
import torch

from p3kv.errors import NotSupportedError, ProtocolError
from p3kv.frontends.torch.optimizers.sgd_after_momentum import SGDAfterMomentum
from p3kv.wire.messages import Key, Message, check_plain, decode


def _named(*names: str) -> Dict[str, Type[torch.optim.Optimizer]]:
    """Classes of `torch.optim`, those that this torch has."""
    return {name: getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)}


BY_SLICE = _named(
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
"""Each computes an element of a weight from the same element of gradient and state, and from
numbers that the key's updates share: bit for bit the same whatever the slices."""
BY_TENSOR = _named("Adafactor", "Muon")
"""Each needs a whole weight, in its shape."""
BY_ROWS = _named("Adagrad", "SGD", "SparseAdam")
"""Each takes sparse gradients, and changes the rows that these have."""
_RUN = {**BY_SLICE, **BY_TENSOR, **BY_ROWS, SGDAfterMomentum.__name__: SGDAfterMomentum}
"""All that servers run, by the names in settings."""
_REFUSED = {
    "LBFGS": "it evaluates the closure several times a step, on all parameters as one vector",
}
"""Reasons."""
_IMPLEMENTATION = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
"""Servers use the plain implementation of all, which is that of `foreach`, bit for bit. `fused` has
other bits, and depends on where slices end."""


class PlainTorchOptimizer(Message, frozen=True):
    """An optimizer of torch's: its class, and what its groups of parameters have."""

    name: str
    groups: List[Dict[str, Any]]
    group_of: List[Tuple[Key, int]]
    since_step: int
    """The store's step at which the optimizer was set."""
    workers: int
    """How many workers' gradients a sum is divided by."""

    def __post_init__(self) -> None:
        check_plain("an optimizer", {"groups": self.groups})
        if self.workers < 1 or not {at for _, at in self.group_of} <= {*range(len(self.groups))}:
            raise ProtocolError("an optimizer's settings name no group of parameters")


def class_of(optimizer: torch.optim.Optimizer) -> Type[torch.optim.Optimizer]:
    """The class of an optimizer as the script has made it, whether or not p3kv is attached."""
    kind: Type[torch.optim.Optimizer] = getattr(optimizer, "script_class", type(optimizer))
    return kind


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Whether servers run an optimizer on whole tensors. Raises NotSupportedError for one that they
    can't run."""
    kind = class_of(optimizer)
    name = kind.__name__
    if any(some.get(name) is kind for some in (BY_SLICE, BY_TENSOR, BY_ROWS)):
        return name in BY_TENSOR
    if kind is getattr(torch.optim, name, None) and name in _REFUSED:
        raise NotSupportedError(f"servers can't run the optimizer {name}: {_REFUSED[name]}")
    known = sorted({**BY_SLICE, **BY_TENSOR, **BY_ROWS})
    called = f"{kind.__module__}.{name}" if name in known else name
    raise NotSupportedError(
        f"servers can't run the optimizer {called}; they run torch.optim's own classes "
        f"{', '.join(known)}"
    )


def plain(
    optimizer: torch.optim.Optimizer, keys: Dict[int, Key], since_step: int, workers: int
) -> PlainTorchOptimizer:
    """The optimizer as it is now; `keys` has the key of each parameter by its id.

    Raises NotSupportedError for an optimizer that servers can't run.
    """
    needs_whole(optimizer)
    kind = class_of(optimizer)
    groups, group_of = [], []
    for place, group in enumerate(optimizer.param_groups):
        groups.append(
            {
                name: _IMPLEMENTATION.get(name, plain_value(value, f"{kind.__name__}'s {name}"))
                for name, value in group.items()
                if name in optimizer.defaults  # all that it reads
            }
        )
        ids = (id(parameter) for parameter in group["params"])
        joined = dict.fromkeys(keys[at] for at in ids if at in keys)  # no quantised ones
        group_of += [(key, place) for key in joined]
    if len(dict(group_of)) < len(group_of):
        raise NotSupportedError(
            "parameters have come into other param_groups since p3kv.torch.Optimizer was made: "
            "call p3kv.torch.Optimizer(model, optimizer) once more"
        )
    return PlainTorchOptimizer(kind.__name__, groups, group_of, since_step, workers)


def momentum_of(optimizer: torch.optim.Optimizer) -> Optional[float]:
    """The momentum of torch's SGD, where a codec can apply it; None of any other optimizer.

    Raises NotSupportedError for SGD whose momentum a codec can't apply.
    """
    if class_of(optimizer) is not torch.optim.SGD:
        return None
    groups = optimizer.param_groups
    momenta = {float(group["momentum"]) for group in groups}
    if len(momenta) > 1 or any(group["nesterov"] or group["dampening"] for group in groups):
        raise NotSupportedError(
            "the codec of gradients applies SGD's momentum, the same to all parameters: give all "
            "groups one momentum, without nesterov and dampening, or use another codec (topk)"
        )
    return momenta.pop() or None


def read(data: bytes) -> PlainTorchOptimizer:
    """Reads what a worker has written; raises ProtocolError for anything else."""
    settings: PlainTorchOptimizer = decode(data, PlainTorchOptimizer)
    if settings.name not in _RUN:
        raise ProtocolError(f"it sent the optimizer {settings.name!r}, which this server can't run")
    return settings


def made(
    settings: PlainTorchOptimizer, group: Dict[str, Any], parameter: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """A new optimizer of one parameter; ProtocolError for settings that its class refuses."""
    kind = _RUN[settings.name]
    takes = inspect.signature(kind).parameters
    try:
        optimizer = kind([parameter], **{one: group[one] for one in group if one in takes})
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"it sent settings that {settings.name} refuses: {error}") from None
    for check in _GPU_CHECKS:
        setattr(optimizer, check, _no_check)
    return optimizer


_GPU_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""Methods by which torch's optimizers ask in each step whether a GPU's stream is captured, by the
names of several versions. The question alone would take memory of a GPU for a server."""


def _no_check() -> None:
    pass


def plain_value(value: Any, where: str) -> Any:
    """An optimizer's value as one that travels. Raises NotSupportedError for one that can't."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and len(value.reshape(-1)) == 1:
        value = value.item()
    if value is None or type(value) in _PLAIN:
        return value
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(one, where) for one in value]
    raise NotSupportedError(
        f"{where} is a {type(value).__name__}, which servers can't be told; use numbers, texts and "
        "lists of them"
    )


_PLAIN = (bool, int, float, str)
