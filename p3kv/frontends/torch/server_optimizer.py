"""torch's optimizers on a server, slice by slice."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch

from p3kv.errors import ProtocolError, in_one_line
from p3kv.frontends.torch.optimizer_settings import PlainTorchOptimizer, made, read
from p3kv.server.optimizer import Optimizer, State
from p3kv.wire.messages import DeclaredKey

SINCE, VALUES = "since_step", "values"
"""In states: at which step the optimizer was set, and what all elements share."""


class _Slice:
    """A slice's parameter, and the optimizer that updates it alone."""

    def __init__(
        self, settings: PlainTorchOptimizer, group: Dict[str, Any], weight: torch.Tensor
    ) -> None:
        self.since_step = settings.since_step
        self.parameter = torch.nn.Parameter(weight)
        self.optimizer = made(settings, group, self.parameter)

    @property
    def state(self) -> Dict[str, Any]:
        found: Dict[str, Any] = self.optimizer.state[self.parameter]
        return found


class TorchOptimizer(Optimizer):
    """Runs the very classes of `torch.optim` on each slice. A sum is divided by the number of
    workers before, so the update is by the mean, as DistributedDataParallel's."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._from_steps: List[int] = []
        self._settings: List[PlainTorchOptimizer] = []
        self._groups: List[Dict[Any, int]] = []
        self._slices: Dict[Tuple[int, int], _Slice] = {}
        self._loaded: Dict[Tuple[int, int], State] = {}
        """States of slices that have not been updated since."""

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        if self._from_steps and from_step < self._from_steps[-1]:
            raise ProtocolError(f"optimizer settings for the past step {from_step}")
        message = read(settings)
        self._from_steps.append(from_step)
        self._settings.append(message)
        self._groups.append(dict(message.group_of))
        unneeded = max(0, bisect_right(self._from_steps, oldest_step) - 1)
        del self._from_steps[:unneeded], self._settings[:unneeded], self._groups[:unneeded]

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        place = len(self._from_steps) if step is None else bisect_right(self._from_steps, step)
        if place == 0 or key.key not in self._groups[place - 1]:
            raise ProtocolError(f"no optimizer settings hold for key {key.key!r} in step {step}")
        settings = self._settings[place - 1]
        group = settings.groups[self._groups[place - 1][key.key]]
        value = torch.from_numpy(weight)
        one = self._slices.get((key.key_id, index))
        if one is None or one.since_step != settings.since_step:
            one = self._slices[key.key_id, index] = _Slice(settings, group, value)
            self._take_loaded(one, (key.key_id, index))
        one.optimizer.param_groups[0].update(group)
        one.parameter.data = value  # another buffer, where a straggler is still sent the last value
        gradient = torch.from_numpy(total)
        if settings.workers > 1:
            gradient /= settings.workers
        one.parameter.grad = gradient
        one.optimizer.step()

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        copied = self.copied(key, index)
        self._slices.pop((key.key_id, index), None)
        self._loaded.pop((key.key_id, index), None)
        return copied

    def copied(self, key: DeclaredKey, index: int) -> Optional[State]:
        one = self._slices.get((key.key_id, index))
        if one is None:
            return self._loaded.get((key.key_id, index))
        return exported(one.state, one.since_step)

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        if not isinstance(state.numbers.get(SINCE), int) or not isinstance(
            state.numbers.get(VALUES), dict
        ):
            raise ProtocolError("it sent a state that no optimizer can have")
        elements = {name: array.copy() for name, array in state.elements.items()}
        self._slices.pop((key.key_id, index), None)
        self._loaded[key.key_id, index] = State(elements, state.numbers)

    def _take_loaded(self, one: _Slice, place: Tuple[int, int]) -> None:
        loaded = self._loaded.pop(place, None)
        if loaded is None or loaded.numbers[SINCE] != one.since_step:
            return
        try:
            one.state.update(imported(loaded))
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                f"it sent a state that no optimizer can have: {in_one_line(error)}"
            ) from error


def exported(state: Dict[str, Any], since_step: int) -> State:
    """A parameter's state in torch, as p3kv keeps it: what has a number for each element, flat, and
    what all elements share."""
    elements, values = {}, {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            values[name] = value
        elif value.dim() == 0:
            values[name] = [value.item()]  # a list, to be told from a number
        else:
            elements[name] = value.detach().reshape(-1).numpy().copy()
    return State(elements, {SINCE: since_step, VALUES: values})


def imported(state: State) -> Dict[str, Any]:
    """The reverse; arrays are copied."""
    found: Dict[str, Any] = {
        name: torch.from_numpy(array.copy()) for name, array in state.elements.items()
    }
    for name, value in state.numbers[VALUES].items():
        found[name] = torch.tensor(float(value[0])) if isinstance(value, list) else value
    return found
