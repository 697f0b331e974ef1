"""Which backward passes' gradients may leave at once, where a script does not say so."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Tuple

Kind = FrozenSet[Tuple[Tuple[int, bool], bool]]
"""What shows of a backward pass when the models are called before it: which, whether a model's
input comes from something that is trained, and whether more than one call was like this."""


class Passes:
    """Tells the last backward pass before a step from others, by what is called before each.

    A gradient leaves once in a step. In scripts for DistributedDataParallel several passes may
    reach a weight between two steps: those of another model's loss (as a GAN's generator's, which
    goes through the critic), or gradients that add up without `no_sync`. A kind of passes that was
    once followed by another pass and not by a step never leaves early. Its gradients leave in
    `step`, as they are then, and so do those of the first pass of a kind after the first step. In
    the first step nothing leaves before `step` anyway, and the optimizer sees what the script does.
    """

    def __init__(self) -> None:
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
        self._is_last: Dict[Kind, bool] = {}
        """Whether all passes of a kind were the last before a step."""
        self.steps = 0
        """How many there were."""

    def called(self, model: int, is_fed: bool, syncs: bool) -> bool:
        """A model is called, for a backward pass to come. `is_fed`: its input comes from something
        that is trained. `syncs`: the call is in no `no_sync`. Returns whether gradients of the pass
        may add up with others."""
        if self._has_begun:
            self._has_begun = False
            self._calls = {}
            self.syncs = True
        call = model, is_fed
        self._calls[call] = self._calls.get(call, 0) + 1
        self.syncs &= syncs
        self._kind = frozenset((call, number > 1) for call, number in self._calls.items())
        self.leaves = self.syncs and (not self.steps or self._is_last.get(self._kind, False))
        return not self.leaves

    def reached(self) -> bool:
        """A gradient is complete; returns whether it leaves."""
        if not self._has_begun:
            self._has_begun = True
            if self.syncs:
                self._since_step.append(self._kind)
        return self.leaves

    def step_ends(self) -> None:
        """The optimizer has made a step."""
        self.steps += 1
        if self._since_step:
            *others, last = self._since_step
            self._is_last.setdefault(last, True)
            self._is_last.update((kind, False) for kind in others)
        self._since_step = []
