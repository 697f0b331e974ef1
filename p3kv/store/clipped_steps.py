"""Steps that are clipped by the norm of all gradients: which pushes belong to one."""

from __future__ import annotations

import math
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional, Set

from p3kv.errors import ConfigError
from p3kv.wire.messages import Key
from p3kv.worker.global_norms import ClippedStep
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class ClippedSteps:
    """Groups a store's pushes into steps, each clipped by the norm of all its gradients: those that
    the front end says belong together, or those of one call. Belongs to the script's thread.
    """

    def __init__(self, own: WorkerStore) -> None:
        self._own = own
        self.max_norm: Optional[float] = None
        """None: steps are not clipped. Infinity: only their norm is computed."""
        self.epsilon = ClippedStep._field_defaults["epsilon"]
        """Added to the norm, by the framework's own number."""
        self.factor = 1.0
        """All sums are multiplied by it before their norm counts."""
        self.drops_nonfinite = self.has_votes = False
        """Whether a step without a finite norm is dropped, and whether each worker votes, by
        `vote`: if any votes for it, the step is dropped."""
        self.drops = False
        """Whether all workers drop the step that ends next."""
        self.number = 0
        """How many steps were clipped."""
        self._inside = False
        self._step = 0
        self._keys: Set[Key] = set()
        self._elems: Dict[int, int] = {}

    @property
    def clips(self) -> bool:
        """Whether steps are clipped."""
        return self.max_norm is not None

    def clip(self, max_norm: Optional[float], barrier: Callable[[str], None]) -> None:
        """Has steps be clipped to `max_norm` from the next one on; None ends this. All workers call
        it, and `barrier(purpose)` waits for them where one thing follows the other."""
        if self.clips != (max_norm is not None):
            barrier("to clip no more" if max_norm is None else "to hold steps for a norm or votes")
        self.max_norm = max_norm

    def norm(self) -> Optional[Future[float]]:
        """The norm of all summed gradients of the last step, before they were scaled; None if no
        step has been clipped. It is known when all workers have pushed."""
        return self._own.norm(self.number) if self.number else None

    def vote(self, drops: bool) -> None:
        """Says, after the last step has ended, whether this worker drops it, and its factor, which
        must be the same on all."""
        self._own.vote(self.number, drops, self.factor)

    def is_dropped(self) -> Future[bool]:
        """Whether the last step has been dropped; known when all workers have pushed and voted."""
        return self._own.is_dropped(self.number)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Groups the pushes inside into one step."""
        self.end()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self.end()

    def begin_call(self) -> bool:
        """Return whether the pushes of a call that begins are a step by themselves."""
        if not self._inside:
            self.end()
        return not self._inside

    def end_call(self) -> None:
        """To be called when keys are pushed."""
        if not self._inside:
            self.end()

    def begins_with(self, key: WorkerKey) -> bool:
        """Whether the push of a key begins a step; it ends the one before."""
        if self._step and key.key not in self._keys:
            return False
        self.end()
        return True

    def begin(self, step: int) -> None:
        """Begins a step."""
        self._step = step
        self.number += 1
        self._own.begin_clipped_step(step)

    def add(self, key: WorkerKey) -> None:
        """Counts a push of the step."""
        self._keys.add(key.key)
        for server, length in key.runs:
            self._elems[server] = self._elems.get(server, 0) + length

    def end(self) -> None:
        """Ends the step, if one has begun."""
        if not self._step:
            return
        assert self.max_norm is not None
        clipped = ClippedStep(
            self._own.number, self.number, self._step, self.max_norm, self._elems, self.epsilon,
            self.factor, self.drops_nonfinite, self.has_votes, self.drops,
        )  # fmt: skip
        self._step, self._keys, self._elems = 0, set(), {}
        self._own.end_clipped_step(clipped)


def checked(max_norm: Any) -> float:
    """The number; ConfigError for one that no norm can be clipped to."""
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not number or not 0 < max_norm < math.inf:
        raise ConfigError(
            f"max_norm is {max_norm!r}; it must be a number above 0, or None to clip no more"
        )
    return float(max_norm)
