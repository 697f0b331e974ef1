"""Workers that train by themselves, and exchange what they have learned in turn."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch

from p3kv.consistency import LocalTraining
from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.late import Late
from p3kv.store.turns import Progress, turns


class _Weight(NamedTuple):
    late: Late
    progress: Progress


class LocalSteps:
    """Makes steps by the script's own optimizer, on this worker. When it is a parameter's turn, its
    difference from the servers' last value leaves, and the weight takes the value that comes some
    steps later, always after the same one: numbers do not depend on when values arrive.

    Belongs to the script's thread.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        rule: LocalTraining,
        every: Sequence[Late],
        workers: int,
    ) -> None:
        """`optimizer` is the script's, and `every` parameter's staging memory has the servers'
        value from the first one on. `workers`: how many there are."""
        self._optimizer = optimizer
        self._parts = workers if rule.adds else 1
        """A gradient counts with one of so many parts."""
        self._exchange = exchange
        self._weights: List[_Weight] = [
            _Weight(late, Progress(turn, rule.steps))
            for late, turn in zip(every, turns([late.key.size_bytes for late in every], rule))
        ]
        self._hooks = [
            late.parameter.register_post_accumulate_grad_hook(partial(_ready, exchange, late))
            for late in every
            if late.parameter.requires_grad
        ]
        """For the first step, which tells the forward order."""

    def step(
        self,
        closure: Optional[Callable[[], Any]],
        scale: Optional[torch.Tensor],
        skips: Optional[torch.Tensor],
    ) -> Any:
        """Updates the weights, and exchanges those whose turn it is; returns what the closure
        returns. `scale` is that of gradients which GradScaler has scaled; `skips`: whether it
        skips the update, because some of them are infinite. The step counts all the same."""
        loss = None
        if self._parts > 1 and closure is not None:  # each has a part of its gradients
            with torch.enable_grad():
                loss, closure = closure(), None
        if not skips:
            for late, _ in self._weights:
                gradient = late.parameter.grad
                if gradient is not None:
                    late.take()
                    if scale is not None:
                        gradient.div_(scale.to(gradient.device))
                    if self._parts > 1:
                        gradient.div_(self._parts)
            if closure is None:
                self._optimizer.step()
            else:
                loss = self._optimizer.step(closure)
        for late, progress in self._weights:
            due = progress.step()
            if due.takes_before:
                _take_from_now_on(late)
            if due.sends:
                self._exchange.push_difference(late)
                if due.takes_now:
                    _take_from_now_on(late)
                else:
                    late.as_sent = late.parameter.detach().clone()
        self._exchange.end_step([late for late, _ in self._weights])
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return loss

    def settle(self) -> None:
        """Has all weights take the values for which they have sent differences."""
        for late, progress in self._weights:
            if progress.awaits:
                progress.settle()
                _take_from_now_on(late)
            late.take()


def _take_from_now_on(late: Late) -> None:
    """Has whoever reads the weight wait for its value."""
    torch.autograd.graph.increment_version(late.parameter)
    late.arm()


def _ready(exchange: Exchange, late: Late, parameter: torch.Tensor) -> None:
    exchange.note_order(late)
