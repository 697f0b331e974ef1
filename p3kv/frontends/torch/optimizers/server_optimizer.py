"""torch's optimizers on a server: slice by slice, row by row, or on whole tensors."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from inspect import signature, unwrap
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch.optim import adam, adamw, sgd

from p3kv.errors import ProtocolError, in_one_line
from p3kv.frontends.torch.optimizers.optimizer_settings import (
    BY_TENSOR,
    PlainTorchOptimizer,
    made,
    read,
)
from p3kv.frontends.torch.optimizers.predictions import predicted
from p3kv.frontends.torch.optimizers.states import MASTER, SINCE, VALUES, exported, imported
from p3kv.frontends.torch.tensors import HALVES, sparse_tensor, tensor_in
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.messages import DeclaredKey


class _Part:
    """The parameter of a slice, of rows, or of a whole tensor, and the optimizer that updates it
    alone.

    Of a weight in half precision, the parameter is a copy in single precision, from which the
    weight is rounded.
    """

    def __init__(
        self, settings: PlainTorchOptimizer, group: Dict[str, Any], weight: torch.Tensor
    ) -> None:
        self.since_step = settings.since_step
        self._is_whole = settings.name in BY_TENSOR
        self._is_half = weight.dtype in HALVES
        self.parameter = torch.nn.Parameter(weight.float() if self._is_half else weight)
        self.optimizer = made(settings, group, self.parameter)
        # Without what torch wraps around each `step`: hooks, a profiler's record and a switch of
        # autograd take longer than the update of a small slice.
        self._step = unwrap(type(self.optimizer).step)
        self._group: Optional[Dict[str, Any]] = None
        """The settings of the last update."""
        self._gradients: List[torch.Tensor] = []
        self._kept_step: Optional[Callable[[], None]] = None
        """The same step, of `_gradients`, where its arguments need not be found anew."""

    def update(self, group: Dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates the weight in place; its memory may be another one each time."""
        if group is not self._group:
            self._group, self._kept_step = group, None
            self.optimizer.param_groups[0].update(group)
        if self._kept_step is None:
            self._kept_step = _kept_step(self.optimizer, self.parameter, self._gradients)
        if not self._is_half:
            self.parameter.data = weight
        if self._kept_step is not None and not gradient.is_sparse:
            self._gradients[:] = (gradient,)
            self._kept_step()
        else:
            self.parameter.grad = gradient
            self._step(self.optimizer)
        if self._is_half and gradient.is_sparse:
            rows = gradient.indices()[0]
            weight.index_copy_(0, rows, self.parameter.detach()[rows].to(weight.dtype))
        elif self._is_half:
            weight.copy_(self.parameter.detach())

    def predicted(self, weight: torch.Tensor, steps: int, damped: bool) -> Optional[np.ndarray]:
        """What the weight will probably be so many updates later; None without a rule."""
        if not self._is_half:
            self.parameter.data = weight
        return predicted(self.optimizer, self.parameter, steps, damped)

    def exported(self, copies: bool = True) -> State:
        """The optimizer's state, and the copy of the weight if there is one."""
        master = {MASTER: self.parameter} if self._is_half else {}
        state = {**self.optimizer.state[self.parameter], **master}
        return exported(state, self.since_step, self._is_whole, copies=copies)

    def load(self, state: State) -> None:
        """Takes an exported state, also one of a weight in another precision."""
        values = imported(state, None if self._is_whole else self.parameter.shape)
        master = values.pop(MASTER, None)
        self._kept_step = None
        if self._is_half and master is not None:
            self.parameter.data = master
        self.optimizer.state[self.parameter].update(values)


class TorchOptimizer(Optimizer):
    """Runs the very classes of `torch.optim` on each slice, or on whole tensors. A sum is divided
    by the sum of all workers' weights before, each 1 by default, so the update is by the mean, as
    DistributedDataParallel's. Workers that have left do not count."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)  # of this thread, which runs optimizers and nothing else
        # Numbers of rows are checked when they arrive; without a choice torch warns.
        torch.sparse.check_sparse_tensor_invariants.disable()
        self._from_steps: List[int] = []
        self._settings: List[PlainTorchOptimizer] = []
        self._groups: List[Dict[Any, int]] = []
        self._parts: Dict[Tuple[int, int], _Part] = {}
        self._loaded: Dict[Tuple[int, int], State] = {}
        """States of parts that have not been updated since."""

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        if self._from_steps and from_step < self._from_steps[-1]:
            raise ProtocolError(f"optimizer settings for the past step {from_step}")
        message = read(settings)
        self._from_steps.append(from_step)
        self._settings.append(message)
        self._groups.append(dict(message.group_of))
        unneeded = max(0, bisect_right(self._from_steps, oldest_step) - 1)
        del self._from_steps[:unneeded], self._settings[:unneeded], self._groups[:unneeded]
        self.whole_tensors = message.name in BY_TENSOR  # like all settings of the store

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        settings, group = self._settings_of(key, step)
        self._take_mean(total, settings)
        value = tensor_in(weight)
        gradient = tensor_in(total)
        if index == WHOLE:
            value, gradient = (one.reshape(key.shape or (1,)) for one in (value, gradient))
        self._part(key, index, settings, group, value).update(group, value, gradient)

    def update_rows(
        self,
        key: DeclaredKey,
        weight: np.ndarray,
        numbers: np.ndarray,
        rows: np.ndarray,
        step: Optional[int],
        ends_update: bool = True,
    ) -> None:
        settings, group = self._settings_of(key, step)
        self._take_mean(rows, settings)
        value, gradient = tensor_in(weight), tensor_in(rows)
        sparse = sparse_tensor(numbers, gradient, weight.shape)
        self._part(key, WHOLE, settings, group, value).update(group, value, sparse)

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        return False  # workers refuse settings by which other rows would change

    def _take_mean(self, total: np.ndarray, settings: PlainTorchOptimizer) -> None:
        """Divides a sum by the sum of all workers' weights; NumPy is quicker than torch at it, with
        the same bits."""
        weight = settings.workers if self.weight is None else self.weight
        if weight != 1:
            total /= weight

    def _settings_of(
        self, key: DeclaredKey, step: Optional[int]
    ) -> Tuple[PlainTorchOptimizer, Dict[str, Any]]:
        """The settings that hold in a step, and those of a key's group."""
        place = len(self._from_steps) if step is None else bisect_right(self._from_steps, step)
        if place == 0 or key.key not in self._groups[place - 1]:
            raise ProtocolError(f"no optimizer settings hold for key {key.key!r} in step {step}")
        settings = self._settings[place - 1]
        return settings, settings.groups[self._groups[place - 1][key.key]]

    def _part(
        self,
        key: DeclaredKey,
        index: int,
        settings: PlainTorchOptimizer,
        group: Dict[str, Any],
        value: torch.Tensor,
    ) -> _Part:
        one = self._parts.get((key.key_id, index))
        if one is None or one.since_step != settings.since_step:
            one = self._parts[key.key_id, index] = _Part(settings, group, value)
            self._take_loaded(one, (key.key_id, index))
        return one

    def predicted(
        self, key: DeclaredKey, index: int, weight: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        one = self._parts.get((key.key_id, index))
        return None if one is None else one.predicted(tensor_in(weight), steps, damped)

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        copied = self.copied(key, index)
        self._parts.pop((key.key_id, index), None)
        self._loaded.pop((key.key_id, index), None)
        return copied

    def copied(self, key: DeclaredKey, index: int) -> Optional[State]:
        one = self._parts.get((key.key_id, index))
        return self._loaded.get((key.key_id, index)) if one is None else one.exported()

    def seen(self, key: DeclaredKey, index: int) -> Optional[State]:
        one = self._parts.get((key.key_id, index))
        return self._loaded.get((key.key_id, index)) if one is None else one.exported(copies=False)

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        if not isinstance(state.numbers.get(SINCE), int) or not isinstance(
            state.numbers.get(VALUES), dict
        ):
            raise ProtocolError("it sent a state that no optimizer can have")
        elements = {name: array.copy() for name, array in state.elements.items()}
        self._parts.pop((key.key_id, index), None)
        self._loaded[key.key_id, index] = State(elements, state.numbers)

    def _take_loaded(self, one: _Part, place: Tuple[int, int]) -> None:
        loaded = self._loaded.pop(place, None)
        if loaded is None or loaded.numbers[SINCE] != one.since_step:
            return
        try:
            one.load(loaded)
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                f"it sent a state that no optimizer can have: {in_one_line(error)}"
            ) from error


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


def _kept_step(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: List[torch.Tensor]
) -> Optional[Callable[[], None]]:
    """Function that makes a step of a dense gradient, the one in `gradients` then, with settings
    and state that the optimizer has, and without what torch does each time to find them, which
    takes longer than the update of a small slice. None before the first step, and where torch
    offers none."""
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
