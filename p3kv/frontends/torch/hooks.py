"""Hooks by which torch tells that gradients are complete."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence
from weakref import WeakMethod

import torch

from p3kv.frontends.torch.values.bucket import Bucket

_STEPS_ALIKE = 3
"""After so many steps in which the same gradient of a bucket was last, only that has a hook."""


class Hooks:
    """Calls a method when a parameter's gradient is complete, in the thread that runs `backward`.
    Belongs to the script's thread.

    A hook takes torch 5 us. So in a bucket whose gradients come in the same order in some steps,
    only the last has one. When not all others are there then, or something has written to them, all
    have hooks again; what has come without one leaves in `step`. No hook may tell of a pass at all,
    as where each of these is of a frozen parameter.
    """

    def __init__(self, buckets: Sequence[Bucket], ready: Callable[[torch.Tensor], None]) -> None:
        """`ready` is a method of an object that is not kept: a model may stay when its optimizer
        goes."""
        self._buckets = buckets
        self._hook = _hook_of(WeakMethod(ready))
        self._handles: Dict[int, Any] = {}
        """By the parameter's id."""
        self._all_stay = False

    def add(self) -> None:
        """To be called once, when all workers have the parameters."""
        for bucket in self._buckets:
            self._add_all(bucket)

    def stay_last(self) -> None:
        """Has torch call these hooks after those that the script has registered since, by which it
        may change the gradient, as DistributedDataParallel does."""
        for handle in self._handles.values():
            every = handle.hooks_dict_ref()
            if every is not None and len(every) > 1 and handle.id in every:
                every[handle.id] = every.pop(handle.id)

    def step_ends(self, bucket: Bucket) -> None:
        """Fewer hooks or more, by what the bucket has seen in its last steps."""
        if bucket.is_lean and not bucket.alike:
            self._add_all(bucket)
        elif bucket.alike >= _STEPS_ALIKE and not (bucket.is_lean or self._all_stay):
            bucket.is_lean = True
            for weight in bucket.weights:
                if weight is not bucket.last:
                    self._handles.pop(id(weight.parameter)).remove()

    def keep_all(self) -> None:
        """From now on, all have hooks: gradients add up, and which ones are new does not show."""
        if not self._all_stay:
            self._all_stay = True
            for bucket in self._buckets:
                if bucket.is_lean:
                    self._add_all(bucket)

    def remove(self) -> None:
        """Nothing is called any more."""
        for handle in self._handles.values():
            handle.remove()

    def _add_all(self, bucket: Bucket) -> None:
        bucket.is_lean = False
        for weight in bucket.weights:
            if id(weight.parameter) not in self._handles:
                self._handles[id(weight.parameter)] = hooked(weight.parameter, self._hook)


def hooked(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Has torch call `hook` when the parameter's gradient is complete; returns torch's handle. Also
    of one that is frozen now, as a script may thaw it at any time: torch takes no hook of it, but
    keeps it."""
    is_trained, parameter.requires_grad = parameter.requires_grad, True
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad = is_trained
    return handle


def _hook_of(ready: Callable[[], Optional[Callable[[torch.Tensor], None]]]) -> Any:
    @torch._disable_dynamo
    def hook(parameter: torch.Tensor) -> None:
        method = ready()
        if method is not None:
            method(parameter)

    return hook
