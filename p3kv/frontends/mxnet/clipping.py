"""Clipping by the norm of all gradients, where optimizers run on the servers: what a step is."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Set, Tuple

from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.mxnet import who_updates
from p3kv.wire.messages import Key
from p3kv.worker.clipping import ClippedStep
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


def checked(max_norm: Any) -> float:
    """The number; ConfigError for one that no norm can be clipped to."""
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not number or not 0 < max_norm < math.inf:
        raise ConfigError(
            f"max_norm is {max_norm!r}; it must be a number above 0, or None to clip no more"
        )
    return float(max_norm)


def refuse_part_of_a_step(keys: Any) -> None:
    """Raises NotSupportedError: the call's keys are of a step that was clipped without them."""
    raise NotSupportedError(
        f"key {keys!r} is pushed after a step has been clipped without it. With "
        "kv.clip_global_norm each call of push or pushpull is a whole step: give it the lists of "
        "all keys and gradients. gluon's Trainer and Module need nothing"
    )


def check_apart(known: Sequence[Tuple[Any, ...]]) -> None:
    """Raises NotSupportedError where the new value of a key is to be written into an array that
    another key of the step needs, too: the second operation would wait for the first, and the first
    for the gradients of the step.

    `known`: keys with their sources and their targets.
    """
    written = {id(target): key for key, _, targets in known for target in targets}
    for key, sources, targets in known:
        if any(written.get(id(array), key) is not key for array in (*sources, *targets)):
            raise NotSupportedError(
                f"{key.called} and another key of the call have an array in common, into which a "
                "new value is to be written. With kv.clip_global_norm no value comes before all "
                "gradients of the step: give each key arrays of its own"
            )


def refuse_without_optimizer() -> None:
    """Raises NotSupportedError: the store has no optimizer for whose sake to clip."""
    raise NotSupportedError(
        "kv.clip_global_norm clips where the servers update weights, and they have no optimizer: "
        f"{who_updates.SERVERS}. Or call kv.clip_global_norm(None), and clip the sums on the "
        "workers: with Trainer(..., update_on_kvstore=False), call trainer.allreduce_grads(), then "
        "gluon.utils.clip_global_norm(gradients, max_norm), then trainer.update(batch_size)"
    )


class Clipping:
    """Groups a store's pushes into steps: all of a Trainer's or Module's, or those of one call.

    Belongs to the script's thread.
    """

    def __init__(self, own: WorkerStore) -> None:
        self._own = own
        self.max_norm: Optional[float] = None
        """None: steps are not clipped."""
        self.number = 0
        """How many steps were clipped."""
        self._inside = False
        self._step = 0
        self._keys: Set[Key] = set()
        self._elems: Dict[int, int] = {}

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """What is pushed inside is one step."""
        self.end()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self.end()

    def begin_call(self, is_new_step: Callable[[], bool], keys: Any) -> None:
        """To be called before keys are pushed. `is_new_step()`: whether one of them has been pushed
        in every step so far. NotSupportedError if they belong to a step that has ended."""
        if not self._inside:
            self.end()
            if not is_new_step():
                refuse_part_of_a_step(keys)

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
        clipped = ClippedStep(self._own.number, self.number, self._step, self.max_norm, self._elems)
        self._step, self._keys, self._elems = 0, set(), {}
        self._own.end_clipped_step(clipped)
