"""Which backward passes' gradients may leave at once, where a script does not say so."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Iterable, List, Set, Tuple

import torch

Kind = FrozenSet[Tuple[Tuple[int, bool], bool]]
"""What shows of a backward pass when the models are called before it: which, whether a model's
input comes from something that is trained, and whether more than one call was like this."""

_SURE = 2
"""A pass's gradients leave at once when so many like it were the last before a step."""


class Passes:
    """Tells the last backward pass before a step from others, by what is called before each.

    A gradient leaves once in a step. In scripts for DistributedDataParallel several passes may
    reach a weight between two steps: those of another model's loss (as a GAN's generator's, which
    goes through the critic), or gradients that add up without `no_sync`. A kind of passes that was
    once followed by another pass and not by a step never leaves early. Its gradients leave in
    `step`, as they are then. So do all of a model some of whose gradients come in parts in the
    first steps, as by reentrant checkpoints.
    """

    def __init__(self, in_parts: Iterable[torch.Tensor]) -> None:
        """`in_parts`: parameters whose gradients may come in parts."""
        self.leaves = False
        """Whether gradients of the pass under way leave as soon as they are computed."""
        self._calls: Dict[Tuple[int, bool], int] = {}
        """Calls of models since the last backward pass."""
        self.syncs = True
        """Whether it is in no `no_sync`."""
        self._kind: Kind = frozenset()
        self._has_begun = False
        """Whether the pass that belongs to these calls has begun."""
        self._since_step: List[Kind] = []
        """The passes since the last step, but those in `no_sync`."""
        self._last: Dict[Kind, int] = {}
        """How often passes of a kind were the last before a step; -1 once one was not."""
        self._steps = 0
        self._comes_in_parts = False
        self._came: Set[int] = set()
        """Ids of parameters whose gradients have come in the pass, while it is not known."""
        self._counting: List[Any] = [
            parameter.register_post_accumulate_grad_hook(self._count)
            for parameter in in_parts
            if parameter.requires_grad
        ]
        """torch's handles of hooks."""

    def called(self, model: int, is_fed: bool, syncs: bool) -> bool:
        """A model is called, for a backward pass to come. `is_fed`: its input comes from something
        that is trained. `syncs`: the call is in no `no_sync`. Returns whether gradients of the pass
        may add up with others."""
        if self._has_begun:
            self._has_begun = False
            self._calls = {}
            self._came.clear()
            self.syncs = True
        call = model, is_fed
        self._calls[call] = self._calls.get(call, 0) + 1
        self.syncs &= syncs
        self._kind = frozenset((call, number > 1) for call, number in self._calls.items())
        is_last = self._last.get(self._kind, 0) >= _SURE
        self.leaves = self.syncs and is_last and not self._comes_in_parts
        return not (self.syncs and (self.leaves or self._steps < _SURE))

    def reached(self) -> bool:
        """A gradient is complete; returns whether it leaves."""
        if not self._has_begun:
            self._has_begun = True
            if self.syncs:
                self._since_step.append(self._kind)
        return self.leaves

    def step_ends(self) -> None:
        """The optimizer has made a step."""
        self._steps += 1
        if self._steps == _SURE:
            for hook in self._counting:
                hook.remove()
            self._counting = []
        if self._since_step:
            *others, last = self._since_step
            for kind in others:
                self._last[kind] = -1
            if self._last.get(last, 0) >= 0:
                self._last[last] = self._last.get(last, 0) + 1
        self._since_step = []

    def _count(self, parameter: torch.Tensor) -> None:
        self._comes_in_parts |= id(parameter) in self._came
        self._came.add(id(parameter))
