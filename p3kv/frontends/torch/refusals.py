"""Refusals of arguments, settings and parameters with which p3kv.torch can't train."""

from __future__ import annotations

import logging
from typing import Any, Mapping, NoReturn, Optional, Union
from weakref import WeakSet

import numpy as np
import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from p3kv import config
from p3kv.common.words import did_you_mean, some_of
from p3kv.config.trials import NATIVE
from p3kv.consistency import Consistency
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.buffer_places import HOWS, IN_FORWARD, LEFT, check_has_shape
from p3kv.frontends.torch.tensors import DTYPES
from p3kv.store.checks import check_choices_alone
from p3kv.store.trial_clock import check_rule_of_trial
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")
_LEAST_TOO_LARGE = 2**63
_STEPS_UNTIL_SURE = 3
"""A script may make a step or two before it makes its optimizer, to warm up."""

WAYS = SERVERS, WORKERS = "servers", "workers"
"""Who updates weights."""
_AVERAGES = "averages gradients, as p3kv does"
_DOES = {
    "DistributedDataParallel": _AVERAGES,
    "DataParallel": "runs copies of the model in one process, where p3kv has a worker for each GPU",
    "FullyShardedDataParallel": "leaves each worker a part of each parameter",
    "FSDPModule": "leaves each worker a part of each parameter",
}
"""By the name of a class of torch's that trains a model in parallel, what it does."""
MADE_TWICE = (
    "the model is in DistributedDataParallel, which p3kv.torch.ddp has p3kv train, and the script "
    "makes a p3kv.torch.Optimizer, too: leave one of both out"
)
_wrappers: WeakSet[torch.nn.Module] = WeakSet()
"""Modules of such classes that are around others."""
_trained: WeakSet[torch.nn.Module] = WeakSet()
"""Models that p3kv trains."""


def watch_wrappers() -> None:
    """Has each module that wraps another one be seen, from now on."""
    register_module_module_registration_hook(_see)


def watch_steps() -> None:
    """Has this worker warn, once, if its script steps torch's optimizers and has made none of
    p3kv's."""
    steps = 0

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps != _STEPS_UNTIL_SURE:
            return
        if this_process.shares_nothing() and hasattr(DistributedDataParallel, "is_p3kv_s"):
            this_process.means_it()
            _log.warning(
                "no model is in DistributedDataParallel so far, so p3kv trains none, and %s has "
                "made %d steps without it",
                type(optimizer).__name__,
                steps,
            )
        elif this_process.shares_nothing():
            _log.warning(
                "this worker has made %d steps of %s, and p3kv knows nothing of them: its weights "
                "differ from those of the job's other workers (%d in all), unless the script "
                "averages gradients itself. Write optimizer = p3kv.torch.Optimizer(model, "
                "optimizer) before the loop.",
                steps,
                type(optimizer).__name__,
                this_process.worker().num_workers,
            )

    register_optimizer_step_post_hook(count)


def check_arguments(
    model: Any,
    optimizer: Any,
    buffers: Optional[str],
    consistency: Optional[str],
    updates: Optional[str],
) -> None:
    """Raises ConfigError for arguments that are no model and its optimizer, and for names that
    there are not; NotSupportedError for a model that something else trains in parallel."""
    usage = "p3kv.torch.Optimizer(model, optimizer)"
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, torch.nn.Module):
        raise ConfigError(f"the model comes first, and then its optimizer: {usage}")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"p3kv.torch.Optimizer needs the model itself (a torch.nn.Module), and not "
            f"{_called(model)}: {usage}"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "p3kv.torch.Optimizer needs an optimizer that has the model's parameters, such as "
            f"torch.optim.AdamW(model.parameters()), and not {_called(optimizer)}: {usage}"
        )
    for name, module in model.named_modules():
        if is_p3kv_s(module):
            raise NotSupportedError(MADE_TWICE)
        kind = _parallel(module)
        if kind:
            raise NotSupportedError(
                f"{f'the module {name!r} of the model' if name else 'the model'} is wrapped in "
                f"{kind}, which {_DOES[kind]}: give p3kv.torch.Optimizer the model that is inside, "
                "and call that one in the loop (model.module)"
            )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
        raise ConfigError(
            "the optimizer has no parameter of the model: make it with model.parameters() of this "
            "one, after the last call that gives the model other parameters, such as "
            "load_state_dict(..., assign=True)"
        )
    if buffers not in (None, IN_FORWARD, LEFT, *HOWS):
        meant = did_you_mean(str(buffers), HOWS)
        raise ConfigError(f"buffers={buffers!r}: use one of {', '.join(map(repr, HOWS))}{meant}")
    if updates not in (None, *WAYS):
        meant = did_you_mean(str(updates), WAYS)
        raise ConfigError(f"updates={updates!r}: use one of {', '.join(map(repr, WAYS))}{meant}")
    if not this_process.joined():
        check_choices_alone(consistency)
    trial = config.trial()
    if trial is not None:
        check_rule_of_trial(consistency)
        if trial.store == NATIVE:
            return  # which trains by a wrapper
    for wrapper in _wrappers:
        if any(id(parameter) in own for parameter in wrapper.parameters()):
            wrapper.register_forward_pre_hook(_refuse_call)
    _trained.add(model)


def _called(argument: Any) -> str:
    """An argument in words."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}"
    return "None" if argument is None else f"an object of the type {type(argument).__name__}"


def _parallel(module: torch.nn.Module) -> str:
    """The name in `_DOES` of the class that makes a module parallel; empty if none does, or if that
    is p3kv's own."""
    if is_p3kv_s(module):
        return ""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _DOES), "")


def is_p3kv_s(module: torch.nn.Module) -> bool:
    """Whether it is a DistributedDataParallel that p3kv trains, and not a compiled module, which
    has the attributes of the one inside."""
    return bool(vars(module).get("is_p3kv_s", False))


def _see(wrapper: torch.nn.Module, name: str, inside: Any) -> None:
    """A module becomes a part of another one: torch's hook."""
    kind = _parallel(wrapper)
    if not kind or not isinstance(inside, torch.nn.Module):
        return
    _wrappers.add(wrapper)
    own = {id(parameter) for model in _trained for parameter in model.parameters()}
    if any(id(parameter) in own for parameter in inside.parameters()):
        raise NotSupportedError(
            f"p3kv.torch.Optimizer trains the model, and {kind} {_DOES[kind]}: leave {kind} out, "
            "and call the model itself"
        )


def _refuse_call(wrapper: torch.nn.Module, inputs: Any) -> NoReturn:
    kind = _parallel(wrapper)
    raise NotSupportedError(
        f"the script calls the model by {kind}, which {_DOES[kind]}, and p3kv.torch.Optimizer "
        "trains it: call the model that is inside (model.module)"
    )


def warn_of_replaced(model: torch.nn.Module, had: Mapping[str, torch.nn.Parameter]) -> None:
    """Warns of parameters, by name, in whose place the model has others by now: nobody trains
    those."""
    now = {id(parameter) for parameter in model.parameters()}
    gone = [name for name, parameter in had.items() if id(parameter) not in now]
    if gone:
        _log.warning(
            "the optimizer has parameters that the model has no more: %s. What is in their place "
            "is not trained: change the model before the optimizers are made",
            some_of(gone),
        )


def number_of(what: str, number: Any) -> Union[int, float]:
    """A script's number as a plain one: of a tensor of one element, that. Raises ConfigError, which
    begins with `what`, for anything that is none."""
    plain = number
    if (isinstance(number, torch.Tensor) and number.numel() == 1) or isinstance(number, np.generic):
        plain = number.item()
    if isinstance(plain, float):
        return plain
    if isinstance(plain, int) and abs(plain) < _LEAST_TOO_LARGE:
        return int(plain)
    raise ConfigError(
        f"{what} an int of 64 bits, a float, or a tensor of one element, not {number!r}"
    )


def check_rule(rule: Consistency, chosen: str) -> None:
    """Raises NotSupportedError for a rule by which p3kv.torch would do something else."""
    if not rule.exchanges_all:
        raise NotSupportedError(
            f"p3kv.torch exchanges each step's gradients, and the consistency '{chosen}' does not: "
            "use another rule"
        )


def check_all_stay(settings: config.Settings, what: str) -> None:
    """Raises NotSupportedError where workers may leave: a worker divides `what` by the number of
    all, and does not know who has left."""
    if settings.let_workers_leave:
        raise NotSupportedError(
            f"{what} would be wrong after a worker has left, and P3KV_LET_WORKERS_LEAVE=1 lets "
            "workers leave: do without one of both"
        )


def check_parameter(parameter: torch.nn.Parameter, name: str, by_servers: bool = True) -> None:
    """Raises NotSupportedError for a parameter that can't travel. `by_servers`: these update it,
    which can't do so with complex numbers."""
    dtype = parameter.dtype if by_servers else parameter.dtype.to_real()
    if dtype not in DTYPES:
        raise NotSupportedError(
            f"the parameter '{name}' is {parameter.dtype}; p3kv.torch takes "
            f"{', '.join(DTYPES.values())}"
        )
    check_has_shape(parameter, name)
    if any(not stride and size > 1 for size, stride in zip(parameter.shape, parameter.stride())):
        raise NotSupportedError(
            f"elements of the parameter '{name}', of shape {tuple(parameter.shape)}, share memory: "
            "give each its own by parameter.data = parameter.data.clone()"
        )
