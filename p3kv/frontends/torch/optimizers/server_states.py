"""The states that servers have, as the script reads and writes them."""

from __future__ import annotations

from collections import UserDict, defaultdict
from hashlib import blake2b
from typing import Any, Callable, DefaultDict, Dict, Mapping, Optional, Tuple

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.optimizers.states import MASTER, exported, imported
from p3kv.frontends.torch.table import Table
from p3kv.frontends.torch.values.bucket import Bucket, Weight
from p3kv.server.optimizer import State
from p3kv.store.states import give_state, states_of
from p3kv.worker.stores import WorkerStore


class ServerStates(UserDict):
    """The `state` of an optimizer whose states servers have: fetched when it is read for the first
    time after a step. What the script has changed goes to them before the next one.

    Belongs to the script's thread.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own: WorkerStore,
        of: Mapping[int, Tuple[Bucket, Weight]],
        whole: bool,
        comes_to_rest: Callable[[], None],
    ) -> None:
        """Take the place of the optimizer's own when servers first have any. `of`: by the
        parameter's id; `whole`: servers update whole tensors. `comes_to_rest()` waits until servers
        have made the last step, or raises NotSupportedError where states can't be read now."""
        self._optimizer, self._own, self._of, self._whole = optimizer, own, of, whole
        self._comes_to_rest = comes_to_rest
        self._entries: DefaultDict[Any, Any] = defaultdict(dict)
        self._fetched: Optional[Dict[int, Any]] = None
        """By a parameter's id: what tells whether its state is still what the servers have. None:
        nobody has read it since the last step."""
        self._have_any = own.resumed is not None
        """Whether the servers may have states."""

    def begin(self) -> None:
        """Servers may have those of a checkpoint."""
        if self._have_any:
            self._optimizer.state = self

    @property
    def data(self) -> DefaultDict[Any, Any]:  # type: ignore[override]
        """All entries, as of now."""
        if self._fetched is None:
            self._comes_to_rest()
            fetched = {}
            for bucket, weight in self._of.values():
                if isinstance(bucket, Table):
                    bucket.say_left_out()
                    continue
                found = states_of(self._own, weight.key, self._whole, weight.member, bucket.pushed)
                if found:
                    shape = None if self._whole and weight.parameter.dim() else weight.shape
                    state = imported(State.joined(found), shape, weight.device)
                    if state:  # SGD without momentum has none, and torch no entry of it
                        self._entries[weight.parameter] = state
                        fetched[id(weight.parameter)] = _bits(state)
            self._fetched = fetched
        return self._entries

    def __getitem__(self, parameter: Any) -> Any:
        return self.data[parameter]

    def copy(self) -> DefaultDict[Any, Any]:  # type: ignore[override]
        """In a dict, as torch has it."""
        return self.data.copy()

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.data))

    def fetch(self) -> None:
        """Has them be here, where the optimizer has no others."""
        if self._optimizer.state is self:
            self.data  # noqa: B018

    def written(self) -> Dict[torch.Tensor, Dict[str, Any]]:
        """Those that the script has changed since it has read them, or since the last call; all
        that it has put in their place. An empty one is to begin anew."""
        held, found = self._optimizer.state, {}
        if held is not self:
            self._optimizer.state = self
            every = [weight.parameter for _, weight in self._of.values()]
            self._fetched = None
            self._entries.clear()
            self._entries.update({one: held[one] for one in held if id(one) not in self._of})
            states = {parameter: held.get(parameter) or {} for parameter in every}
            found = {one: state for one, state in states.items() if state or self._have_any}
            self._have_any = True
        elif self._fetched is not None:
            for _, weight in self._of.values():
                state = self._entries.get(weight.parameter) or {}
                bits = _bits(state)
                if bits != self._fetched.get(id(weight.parameter), {}):
                    found[weight.parameter] = state
                    self._fetched[id(weight.parameter)] = bits
        return found

    def give(self, written: Mapping[torch.Tensor, Dict[str, Any]], since_step: int) -> None:
        """Gives the servers states that parameters have from now on. No value is under way, and
        they make no step without this worker's gradients."""
        for parameter, state in written.items():
            _, weight = self._of[id(parameter)]
            if not weight.is_table:
                self._give(weight, state, since_step)
            elif state and state.get("step", 1):  # Adagrad begins with one
                raise NotSupportedError(
                    f"the optimizer's state of the table '{weight.name}' was loaded or changed, and"
                    " it is on the servers: leave it out of the state_dict"
                )

    def _give(self, weight: Weight, state: Dict[str, Any], since_step: int) -> None:
        value, master = weight.parameter.detach(), state.get(MASTER)
        if master is not None and not torch.equal(master.to(value), value):
            state = {name: value for name, value in state.items() if name != MASTER}
        given = exported(state, since_step, self._whole, weight.name)
        for name, array in given.elements.items():
            if not self._whole and array.size != value.numel():
                raise NotSupportedError(
                    f"the entry {name!r} in the state of '{weight.name}' has {array.size} "
                    f"elements, and the weight has {value.numel()}: servers keep entries that have "
                    "a number for each element"
                )
        give_state(self._own, weight.key, given if state else None, self._whole, weight.member)

    def step_ends(self) -> None:
        """States of parameters are others from now on."""
        self._fetched = None
        for _, weight in self._of.values():
            self._entries.pop(weight.parameter, None)


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
