"""What a script changes between `backward` and `step`: then the step is not by what has left."""

from __future__ import annotations

import operator
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.values.bucket import Bucket, Weight
from p3kv.frontends.torch.values.leaving import Leaving, is_part
from p3kv.frontends.torch.values.watched import watcher_of

WRITES = "the script writes to weights"
_RATES = "the script sets the optimizer's param_groups between backward and step"


class Changes:
    """Finds the first change of a step to the optimizer's settings, a weight or a gradient, and
    says in words what it is.

    Belongs to the script's thread; backward passes have a thread for each device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        of: Mapping[int, Tuple[Bucket, Weight]],
    ) -> None:
        """`of`: by a parameter's id, its bucket and its weight."""
        self._optimizer, self._exchange, self._of = optimizer, exchange, of
        self._settings_then: List[Any] = []
        self._versions_then: List[int] = []
        """Of the optimizer's groups, when the first gradient came, and torch's counts of writes to
        those that are tensors."""
        self._seen: Dict[int, Leaving] = {}
        """By weight: gradients that leave in `step`, whose uses are seen until then."""

    def first_gradient_comes(self) -> None:
        """The first pass of the first step has a gradient."""
        if not self._settings_then:
            self._settings_then, self._versions_then = self._settings()

    def see(self, bucket: Bucket, weight: Weight) -> None:
        """Has uses of a gradient be seen that leaves in `step`: while it is not decided who updates
        the weights, they decide it, and later nothing may change it."""
        gradient = weight.parameter.grad
        assert gradient is not None
        seen = Leaving(weight, gradient, bucket.wait, keeps_copy=is_part(gradient))
        seen.on_use = self._exchange.on_use
        self._seen[id(weight)] = seen

    def unsee(self, weight: Weight) -> Optional[Leaving]:
        """The gradient of a weight whose uses were seen; they are not any more."""
        seen = self._seen.pop(id(weight), None) if self._seen else None
        if seen is not None:
            seen.stays()
        return seen

    def check_seen(self) -> None:
        """Raises NotSupportedError where the script has changed a gradient that is to leave now:
        it has changed this worker's own, and not the mean."""
        for _, weight in self._of.values() if self._seen else ():
            seen, now = self.unsee(weight), weight.parameter.grad
            change = None if seen is None or now is None else seen.change(now)
            if change is not None and now is not None and now.any():
                raise NotSupportedError(
                    f"the gradient of '{weight.name}' {change} between backward and step, for the "
                    "first time after the first step: it was this worker's own by then, and not "
                    "the mean of all workers'. Set P3KV_UPDATES=workers, by which it is the mean"
                )

    def are_given(self) -> bool:
        """Whether the script has set gradients, where no pass has come since the last step."""
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [weight.parameter.grad for _, weight in self._of.values()]
            return any(one is not None and watcher_of(one) is None for one in gradients)

    def are_parts(self) -> bool:
        """Whether the script has made gradients of parts of a larger tensor: what it does with that
        shows in none of them."""
        with torch._C.DisableTorchFunctionSubclass():
            gradients = (weight.parameter.grad for _, weight in self._of.values())
            return any(one is not None and is_part(one) for one in gradients)

    def of_first_step(self) -> str:
        """What has changed in the first step, in which nothing has left; empty if nothing has."""
        now, versions = self._settings()
        then = self._settings_then
        is_other = len(now) != len(then) or any(map(operator.is_not, now, then))
        if then and (is_other or versions != self._versions_then):
            return _RATES
        if self._exchange.written_late(under_way=False):
            return WRITES
        return self.of_gradients()

    def of_later_step(self, settings: TorchScriptOptimizer, are_held: bool) -> str:
        """What has changed in a step of which gradients have left, by `settings`; empty if nothing
        has. `are_held`: servers wait for word of the step's end."""
        with torch._C.DisableTorchFunctionSubclass():  # weights are of a class that is told
            if settings.has_changed():
                return _RATES
            if self._exchange.written_late(under_way=not are_held):
                return f"{WRITES} between backward and step"
            return self.of_gradients()

    def of_gradients(self) -> str:
        """Which gradient has changed since it was computed; empty if none has."""
        for bucket, weight in self._of.values():
            leaving, now = weight.leaving or self._seen.get(id(weight)), weight.parameter.grad
            if leaving is not None:
                change = leaving.change(now)
            else:
                change = "was set" if bucket.pushed and now is not None else None
            if change is not None:
                return f"the gradient of '{weight.name}' {change} before step"
        return ""

    def _settings(self) -> Tuple[List[Any], List[int]]:
        """The very objects: a schedule's first number may be equal to what it replaces."""
        groups = self._optimizer.param_groups
        its = [one[name] for one in groups for name in sorted(one) if name != "params"]
        now = [self._optimizer._scheduled, *its]
        return now, [one._version for one in now if isinstance(one, torch.Tensor)]
