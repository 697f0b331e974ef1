"""A unit: what a server ends rounds of by itself, a slice or all rows that it keeps of a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Collection, List, Optional

import numpy as np

from p3kv.server.engine.ledger import Ledger
from p3kv.server.engine.plan import KeyPlan
from p3kv.server.engine.rounds import Round
from p3kv.wire.header import INITIAL_ROUND


class Unit(ABC):
    """A value, and the ledger of its rounds."""

    plan: KeyPlan
    ledger: Ledger[Any]
    first_round = INITIAL_ROUND
    """The first round of which the unit can have a value."""

    @property
    def round(self) -> int:
        """The last round whose result the value is."""
        return self.ledger.round

    @property
    @abstractmethod
    def name(self) -> str:
        """The unit's name in messages."""

    @property
    @abstractmethod
    def size_elems(self) -> int:
        """How many elements the value has."""

    @abstractmethod
    def summed(self, current: Round) -> Optional[np.ndarray]:
        """The elements of a complete round's sum that are not left out for being 0, flat; None if
        no worker had a gradient."""

    def scale(self, current: Round, total: Optional[np.ndarray]) -> None:
        """Scales the sum of a round that ends, if its step is clipped. In a store without an
        optimizer, no gradients are clipped."""
        plan = self.plan
        held_rounds = plan.rules.held_rounds  # mostly of no step
        if held_rounds.steps and plan.optimizer is not None and not plan.consistency.own_rounds:
            held_rounds.scale(current.step, self.size_elems, total)

    @abstractmethod
    def update(self, current: Round) -> bool:
        """Makes the value of a complete round, which the ledger then counts as ended; whether any
        worker had a gradient, since else nothing changes."""


@dataclass
class Ended:
    """A round that has ended, or the answers to one that has ended before."""

    unit: Unit
    round: int
    """Round as workers count it."""
    step: int
    priority: int
    wanting: List[int]
    """Ranks to which the value is to be sent."""
    others: List[int]
    """Ranks that are to be told that the round has ended."""
    have_value: Collection[int] = ()
    """Those of `wanting` that have the value that they were sent last."""
    have_last: Collection[int] = ()
    """Those of them that have the value of the round before."""
    no_gradient: bool = False
    """Whether no worker had a gradient in the round, so that nothing has changed."""
    exact: bool = False
    """Whether a worker wants the value as it is, whatever the codec."""
