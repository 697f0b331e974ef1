"""States of torch's optimizers, as servers and checkpoints have them."""

from __future__ import annotations

from collections import UserDict, defaultdict
from hashlib import blake2b
from itertools import chain
from typing import (
    Any,
    Callable,
    Collection,
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


class ServerStates(UserDict):
    """The `state` of an optimizer whose states servers have: fetched when it is read for the first
    time after a step.

    Belongs to the script's thread.
    """

    def __init__(self, fetch: Callable[[], Iterator[Tuple[torch.Tensor, Dict[str, Any]]]]) -> None:
        """`fetch()` asks the servers for the state of each parameter that has one."""
        self._fetch = fetch
        self._entries: DefaultDict[Any, Any] = defaultdict(dict)
        self._fetched: Optional[Dict[int, Any]] = None
        """By a parameter's id: what tells whether its state is still what the servers have. None:
        nobody has read it since the last step."""

    @property
    def data(self) -> DefaultDict[Any, Any]:  # type: ignore[override]
        """All entries, as of now."""
        if self._fetched is None:
            fetched = list(self._fetch())
            self._entries.update(fetched)
            self._fetched = {id(one): _bits(state) for one, state in fetched}
        return self._entries

    def __getitem__(self, parameter: Any) -> Any:
        return self.data[parameter]

    def copy(self) -> DefaultDict[Any, Any]:  # type: ignore[override]
        """In a dict, as torch has it."""
        return self.data.copy()

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.data))

    def written(self, parameters: Collection[torch.Tensor]) -> Dict[torch.Tensor, Dict[str, Any]]:
        """Those states of these parameters that the script has changed since it has read them, or
        since the last call. An empty one is to begin anew."""
        if self._fetched is None:
            return {}
        found = {}
        for parameter in parameters:
            state = self._entries.get(parameter) or {}
            bits = _bits(state)
            if bits != self._fetched.get(id(parameter), {}):
                found[parameter] = state
                self._fetched[id(parameter)] = bits
        return found

    def come_after(self, states: Mapping[Any, Any], parameters: Collection[torch.Tensor]) -> None:
        """Takes the place of other states, of which it has those entries that are of no parameter;
        servers get the others."""
        known = {id(one) for one in parameters}
        self._fetched = None
        self._entries.clear()
        self._entries.update({one: states[one] for one in states if id(one) not in known})

    def step_ends(self, parameters: Collection[torch.Tensor]) -> None:
        """The states of these parameters are others from now on."""
        self._fetched = None
        for parameter in parameters:
            self._entries.pop(parameter, None)


def _bits(state: Dict[str, Any]) -> Dict[str, Any]:
    """What differs between two states that differ in a bit."""
    return {
        name: (value.shape, value.dtype, _digest(value))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def _digest(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).digest()


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
