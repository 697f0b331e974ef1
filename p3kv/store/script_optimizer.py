"""Interface of the optimizer that a script has set, which servers run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, Optional, TypeVar

from p3kv.wire.messages import Key


class ScriptOptimizer(ABC):
    """The optimizer that a script has set, and what the servers must be told of it and when.

    Every worker has one, so that all know what the servers need. Belongs to the script's thread.
    """

    name: str
    """Name of its class, for messages and checkpoints."""
    rule: Optional[str] = None
    """The consistency rule, where by this one workers train by themselves."""
    front_end: Optional[str] = None
    """Name in the servers' table, if it is not that of the script's front end."""
    needs_whole_tensors = False
    """Whether it updates tensors as a whole, and not slices."""
    predicts = False
    """Whether it has a rule that says what a weight will be some updates later."""
    momentum: Optional[float] = None
    """Momentum of SGD that has one and does not clip gradients, which a codec may apply in the
    servers' place; None of any other optimizer."""
    counts_updates = True
    """Whether `begin_step` needs the number of updates. If not, each step that the front end marks
    has a number of its own, and nobody waits to learn which steps have changed nothing."""
    shares_numbers = False
    """Whether `shared_number` is to be asked for every push."""

    @property
    @abstractmethod
    def settings(self) -> bytes:
        """Settings to build the optimizer from, as the front end's server part reads them."""

    @abstractmethod
    def begin_step(self, step: int, updates: int) -> Optional[bytes]:
        """Begins a step, that of the `updates`-th update, the first being 1; returns the settings
        that hold from it on, where they are new."""

    def note_updates(self, key: Key, updates: int) -> None:  # noqa: B027
        """Says how often it has updated a key by now; fewer than before where a push has turned out
        to change nothing."""

    @abstractmethod
    def has_changed(self) -> bool:
        """Whether the script has changed it since a step began."""

    def remembered(self) -> Dict[str, Any]:
        """Plain values for all keys together that updates have changed in it; an optimizer that
        goes on from a checkpoint is made from them, too."""
        return {}

    def shared_number(self, key: Key, update: int) -> Optional[bytes]:
        """Number that the servers need for one push beside the step's settings, where the update of
        one key leaves a number for the next. `update` counts the key's, from 1."""
        return None


O = TypeVar("O", bound=ScriptOptimizer)  # noqa: E741
