"""Steps of torch's most used optimizers without what torch does each time to find their arguments,
which takes longer than the update of a small slice."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.optim import adam, adamw, sgd

_Function = Tuple[Callable[..., None], Tuple[str, ...]]
_ENTRIES = {
    "exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq", "max_exp_avg_sqs": "max_exp_avg_sq",
    "momentum_buffer_list": "momentum_buffer", "state_steps": "step",
}  # fmt: skip
"""Arguments, and the entries of a state that they have."""
_FIXED = {"found_inf": None, "grad_scale": None, "has_complex": False, "has_sparse_grad": False}


def _functions() -> Dict[type, _Function]:
    """What `step` calls at last, by the class, and its arguments. They change states in place."""
    of_adam = getattr(adam, "_single_tensor_adam", None)
    found = {
        torch.optim.Adam: of_adam,
        torch.optim.AdamW: getattr(adamw, "_single_tensor_adamw", of_adam),
        torch.optim.SGD: getattr(sgd, "_single_tensor_sgd", None),
    }
    return {
        kind: (function, tuple(signature(function).parameters))
        for kind, function in found.items()
        if function is not None
    }


_FUNCTIONS = _functions()


def kept_step(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: List[torch.Tensor]
) -> Optional[Callable[[], None]]:
    """Function that makes a step of a dense gradient, the one in `gradients` then, with settings
    and state that the optimizer has; None before the first step, and where torch offers none."""
    if type(optimizer) not in _FUNCTIONS:
        return None
    function, arguments = _FUNCTIONS[type(optimizer)]
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    keeps_nothing = isinstance(optimizer, torch.optim.SGD) and not group["momentum"]
    if None in state.values() or not (state or keeps_nothing):
        return None
    values: Dict[str, Any] = {**_FIXED, **group, "params": [parameter], "grads": gradients}
    values.update(zip(("beta1", "beta2"), group.get("betas", ())))
    for name, entry in _ENTRIES.items():
        values[name] = [state[entry]] if entry in state else []
    if not values.keys() >= set(arguments):
        return None
    return partial(function, **{name: values[name] for name in arguments})
