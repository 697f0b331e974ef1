"""Rounds whose end waits for the norm of all gradients of their step."""

from __future__ import annotations

from typing import Callable, Dict, Generic, Iterable, List, Optional, TypeVar

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.engine.squares import exact_squares, sum_of_squares

T = TypeVar("T")
"""Unit that ends rounds by itself: a slice, or all rows of a key."""


class _Step(Generic[T]):
    """This server's part of a step whose gradients are clipped."""

    def __init__(self) -> None:
        self.held: Dict[T, None] = {}
        """Slices whose sum is complete, and whose round has not ended, in the order in which they
        were complete."""
        self.squares: List[float] = []
        self.complete_elems = 0
        self.pushed_elems: Optional[int] = None
        """Elements that worker rank 0 has pushed in the step, once it has pushed all."""
        self.scale: Optional[float] = None
        self.unscaled_elems = 0


class HeldRounds(Generic[T]):
    """Holds the rounds of a step until worker rank 0 has said how its gradients are scaled.

    A step is what rank 0 calls so: each round belongs to the step in which rank 0 has pushed for
    it. Rank 0 says that a step is clipped before its first slice, and how many elements it has
    pushed to this server after the last. When all workers' gradients of these elements are summed,
    the sum of their squares goes to rank 0, which has those of all servers and so the norm.

    Belongs to the server's thread.
    """

    def __init__(
        self, send_squares: Callable[[int, List[float]], None], exact: bool = False
    ) -> None:
        """`send_squares(step, parts)` sends numbers to worker rank 0 whose sum is that of the
        squares; `exact`: sums of squares must not depend on slices and servers."""
        self.steps: Dict[int, _Step[T]] = {}
        """Empty where nothing is clipped: then no other method need be called."""
        self._exact = exact
        self._send_squares = send_squares

    # What worker rank 0 says.

    def begin(self, step: int) -> None:
        """Holds a step's rounds from now on, before its first slice has come."""
        if step in self.steps:
            raise ProtocolError(f"it began the clipped step {step} twice")
        self.steps[step] = _Step()

    def end_pushes(self, step: int, elems: int) -> None:
        """Takes note that rank 0 pushes nothing more in a step, and how much it has pushed here."""
        clipped = self._known(step)
        if clipped.pushed_elems is not None:
            raise ProtocolError(f"it ended the clipped step {step} twice")
        clipped.pushed_elems = elems
        self._look(step, clipped)

    def scaled(self, step: int, scale: float) -> Iterable[T]:
        """Takes the number by which a step's gradients are multiplied; returns the slices whose
        round may end now."""
        clipped = self._known(step)
        if clipped.complete_elems != clipped.pushed_elems or clipped.scale is not None:
            raise ProtocolError(f"it scaled the clipped step {step}, whose norm is not known")
        clipped.scale = scale
        clipped.unscaled_elems = clipped.complete_elems
        if not clipped.held:
            del self.steps[step]
        return clipped.held

    # What the engine asks.

    def is_new(self, step: int, unit: T) -> bool:
        """Whether a slice whose sum of a step is complete is to be counted with `hold`."""
        return step in self.steps and unit not in self.steps[step].held

    def hold(self, step: int, unit: T, elems: int, total: Optional[np.ndarray]) -> None:
        """Counts a slice's sum, which stays as it is until its round ends; None where no worker
        had a gradient."""
        clipped = self.steps[step]
        clipped.held[unit] = None
        clipped.complete_elems += elems
        if total is None:
            pass
        elif self._exact:
            clipped.squares += exact_squares(total)
        else:
            clipped.squares = [sum(clipped.squares) + sum_of_squares(total)]
        self._look(step, clipped)

    def holds(self, step: int) -> bool:
        """Whether the rounds of a step must not end yet."""
        return step in self.steps and self.steps[step].scale is None

    def scale(self, step: int, elems: int, total: Optional[np.ndarray]) -> None:
        """Scales the sum of a round that ends, if it has one."""
        clipped = self.steps.get(step)
        if clipped is None:
            return
        assert clipped.scale is not None
        if total is not None and clipped.scale != 1.0:
            with np.errstate(invalid="ignore", under="ignore"):
                np.multiply(total, total.dtype.type(clipped.scale), out=total)
        clipped.unscaled_elems -= elems
        if clipped.unscaled_elems == 0:
            del self.steps[step]

    def _known(self, step: int) -> _Step[T]:
        clipped = self.steps.get(step)
        if clipped is None:
            raise ProtocolError(f"it speaks of the clipped step {step}, which has not begun")
        return clipped

    def _look(self, step: int, clipped: _Step[T]) -> None:
        if clipped.pushed_elems is None:
            return
        if clipped.complete_elems > clipped.pushed_elems:
            raise ProtocolError(
                f"it pushed more than the {clipped.pushed_elems} elements that it has announced in "
                f"the clipped step {step}"
            )
        if clipped.complete_elems == clipped.pushed_elems > 0:
            self._send_squares(step, clipped.squares)
