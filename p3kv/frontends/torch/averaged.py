"""Which parameters' gradients are to be the means of all workers'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Container, Iterable, List, Optional, Sequence, Set, Tuple

import torch

from p3kv.frontends.torch.steps import parameters_of

_Parameters = Tuple[torch.nn.Parameter, ...]


@dataclass(frozen=True)
class Averaged:
    """What is averaged beside an optimizer's parameters, or is not of these, since models in
    DistributedDataParallel have others. An optimizer without such models has its own averaged."""

    bare: _Parameters = ()
    """The optimizer's that none of the models averages: each worker trains its own."""
    orphans: _Parameters = ()
    """The models' that no optimizer has."""
    asleep: _Parameters = ()
    """Those like `orphans` that are frozen, and were not when they were wrapped."""

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer,
        models: Sequence[torch.nn.Parameter],
        trained: Container[int],
        taken: Container[int],
    ) -> Averaged:
        """`models`: the parameters that its models average, of which others see to those whose ids
        are in `taken`. `trained`: ids of those that were not frozen when they were wrapped."""
        averages = {*map(id, models)}
        left = [one for one in models if id(one) not in taken]
        return cls(
            tuple(one for one in parameters_of(optimizer) if id(one) not in averages),
            tuple(one for one in left if one.requires_grad),
            tuple(one for one in left if not one.requires_grad and id(one) in trained),
        )

    def parameters(self, optimizer: torch.optim.Optimizer) -> List[torch.nn.Parameter]:
        """All, in the order of the optimizer's groups, then those that it has not."""
        bare = {*map(id, self.bare)}
        own = [one for one in parameters_of(optimizer) if id(one) not in bare]
        return [*dict.fromkeys((*own, *self.orphans))]

    def extra(self) -> Set[int]:
        """The ids of those that no optimizer has."""
        return {*map(id, self.orphans + self.asleep)}

    def with_orphans(self, more: Iterable[torch.nn.Parameter]) -> Averaged:
        return replace(self, orphans=(*self.orphans, *more))

    def without(self, taken: Container[int]) -> Averaged:
        """Others see to those with these ids."""
        return replace(
            self,
            orphans=tuple(one for one in self.orphans if id(one) not in taken),
            asleep=tuple(one for one in self.asleep if id(one) not in taken),
        )

    def awake(self) -> Averaged:
        """With those that are frozen no more."""
        return replace(
            self.with_orphans(one for one in self.asleep if one.requires_grad),
            asleep=tuple(one for one in self.asleep if not one.requires_grad),
        )

    def why_servers_cannot(self) -> Optional[str]:
        """Why servers can't update an optimizer's parameters, and workers can."""
        if self.orphans:
            return (
                f"{len(self.orphans)} parameters of the model have gradients and no optimizer, such"
                f" as one of shape {tuple(self.orphans[0].shape)}, and DistributedDataParallel "
                "averages these, too (requires_grad_(False) leaves them out)"
            )
        bare = [one for one in self.bare if one.requires_grad]
        if bare:
            return (
                f"the optimizer has {len(bare)} parameters that no DistributedDataParallel "
                f"averages, such as one of shape {tuple(bare[0].shape)}, so each worker trains its "
                "own"
            )
        return None


def averaged(optimizer: torch.optim.Optimizer) -> List[torch.nn.Parameter]:
    """The parameters whose gradients an optimizer's steps have be the means of all workers'."""
    what: Averaged = getattr(optimizer, "_averaged", Averaged())
    return what.parameters(optimizer)
