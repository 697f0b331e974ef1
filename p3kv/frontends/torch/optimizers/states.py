"""States of torch's optimizers, as servers and checkpoints have them."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import (
    Any,
    DefaultDict,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    Union,
)

import torch

from p3kv.frontends.torch.optimizers.optimizer_settings import plain_value
from p3kv.frontends.torch.tensors import HALVES
from p3kv.server.optimizer import State

SINCE, VALUES = "since_step", "values"
"""In `State.numbers`: at which step the optimizer was set, and what all elements share."""
MASTER = "master_param"
"""The weight in single precision, where the parameter is of half precision; as in the states of
other libraries that keep one."""


_SHARED = ("eta", "mu", "mu_product", "step")
"""Names of numbers that all elements of a parameter share. They are scalar tensors, and so is all
of a scalar parameter's state."""


def exported(
    state: Dict[str, Any], since_step: int, whole: bool, name: str = "", copies: bool = True
) -> State:
    """A parameter's state in torch, as p3kv keeps it: what has a number for each element, flat, and
    what all elements share. Arrays of a `whole` tensor's state have any shape, and keep it. Half
    precision becomes single precision. Without `copies`, arrays may be torch's own.

    Raises NotSupportedError for what servers can't keep of the parameter with this `name`.
    """
    elements, values = {}, {}
    for entry, value in state.items():
        if not isinstance(value, torch.Tensor):
            values[entry] = plain_value(value, f"the entry {entry!r} in the state of '{name}'")
        elif entry in _SHARED:
            values[entry] = [value.item()]  # a list, to be told from a number
        else:
            array = _widened(value.detach()).cpu().numpy()
            array = array.copy() if copies else array
            elements[entry] = array if whole and array.ndim else array.reshape(-1)
    return State(elements, {SINCE: since_step, VALUES: values})


def imported(
    state: State, shape: Optional[torch.Size] = None, device: Union[torch.device, str] = "cpu"
) -> Dict[str, Any]:
    """The reverse; arrays are copied to a device, and get the parameter's `shape` if it is given.
    What all elements share stays on the CPU, as in torch."""
    found: Dict[str, Any] = {
        name: torch.from_numpy(array.copy())
        .reshape(array.shape if shape is None else shape)
        .to(device)
        for name, array in state.elements.items()
    }
    for name, value in state.numbers[VALUES].items():
        if isinstance(value, list):
            value = torch.tensor(float(value[0]), device="cpu")
        found[name] = value
    return found


def unrounded(
    state_dict: Dict[str, Any], groups: List[Dict[str, Any]]
) -> Iterator[Tuple[torch.Tensor, Dict[str, Any]]]:
    """Parameters of half precision in `groups` and their states in `state_dict`, which torch would
    round when it loads them; servers keep them in single precision."""
    names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    for name, parameter in zip(names, parameters):
        if parameter.dtype in HALVES and name in state_dict["state"]:
            state = state_dict["state"][name]
            yield (
                parameter,
                {
                    key: _widened(value) if isinstance(value, torch.Tensor) else value
                    for key, value in state.items()
                },
            )


def rounded(states: Mapping[Any, Any]) -> DefaultDict[Any, Any]:
    """States of parameters as torch's own optimizers have them, in half precision if these are."""
    found = defaultdict(dict, states)
    for one, state in states.items():
        if isinstance(one, torch.Tensor) and one.dtype in HALVES:
            found[one] = {
                key: value if key in _SHARED or not hasattr(value, "to") else value.to(one.dtype)
                for key, value in state.items()
                if key != MASTER
            }
    return found


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in HALVES else value
