"""Rounds of a unit, and the pushes that have arrived in them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, Generic, List, NamedTuple, Set, TypeVar

from p3kv.wire.messages import UNKNOWN

S = TypeVar("S")
"""Sum of a unit's gradients of one round."""


@dataclass(eq=False)
class Round(Generic[S]):
    """Pushes of a unit that have arrived in one round."""

    number: int
    """Number as workers count it."""
    sum: S
    step: int = 0
    """The step in which worker rank 0 pushed; until it has, that of the first push."""
    owner: int = UNKNOWN
    """The rank whose own round it is, where workers do not share rounds."""
    arrived: Set[int] = field(default_factory=set)
    """Ranks whose pushes are complete."""
    wanting: List[int] = field(default_factory=list)
    """Ranks that asked for a result with their push, and have not been sent any."""
    have_value: Set[int] = field(default_factory=set)
    """Those of them that have the value that they were sent last."""
    have_last: Set[int] = field(default_factory=set)
    """Those of them that have the value of the round before."""
    others: List[int] = field(default_factory=list)
    """Ranks that want to know that the round has ended, and whose results do not tell them."""
    in_sums: int = 0
    """How many workers have said that their slices are in the sums of their hosts, less those whose
    slices have come in sums."""
    changed: bool = True
    """Once it has ended: whether any worker had a gradient."""
    lacks_gradient: bool = False
    """Whether a worker, or all of a host, has said that it has no gradient."""
    lacking: int = -1
    """Of a bucket: the tensors of which no worker has pushed a gradient, a bit for each."""
    exact: bool = False
    """Whether a worker wants the value as it is, whatever the codec."""
    priority: int = 0
    since_s: float = field(default_factory=time.monotonic)
    """When the first push arrived, on the monotonic clock."""
    ready_s: Dict[int, float] = field(default_factory=dict)
    """By rank, when the gradients were ready that have arrived; kept by `Lateness`."""


class OpenRound(NamedTuple):
    """A round that can't end yet."""

    number: int
    """Round as workers count it. The initial one, where a later one waits for that."""
    round: Round
    """Pushes that have come."""
    missing: List[int]
    """Ranks of the workers for which it waits."""
