"""How a store goes on from a checkpoint."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import (
    Any,
    Callable,
    Dict,
    Generic,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from p3kv.checkpoints import Saved, SavedState, StoredRows
from p3kv.common.naming import NamePair, SameNames, both
from p3kv.common.words import some_of
from p3kv.errors import CheckpointError
from p3kv.server.optimizer import State
from p3kv.store.checks import check_optimizer
from p3kv.store.pushes import Pushes
from p3kv.store.script_optimizer import O
from p3kv.wire.messages import Key, all_called, called
from p3kv.worker.saving.cuts import Unpushed
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

_log = logging.getLogger("p3kv")
_EACH_PUSH = "a rule by which each push is an update (bounded, asynchronous)"


class Counts(NamedTuple):
    """How far a store's optimizer is, as all workers know it."""

    optimizer: str
    """Name of its class."""
    steps: int
    """Its updates of the key that was updated most often."""
    updates: Dict[Key, int]
    remembered: Mapping[str, Any]
    """Values of `ScriptOptimizer.remembered`."""
    rule: Optional[str] = None
    """What matters of the consistency rule; None: the gradients of all workers make an update."""
    front_end: Optional[str] = None
    """Whose optimizer it is, as far as the checkpoint says."""


class GoesOn(ABC, Generic[O]):
    """A front end's part: its optimizers count on, and have their states."""

    @abstractmethod
    def optimizer(self, fresh: O, counts: Counts, since_step: int) -> O:
        """The script's optimizer, which is `fresh`, as one that has made `counts.steps` steps
        before `since_step`'s next one."""

    @abstractmethod
    def give(self, key: WorkerKey, states: Sequence[State], optimizer: O, member: int = 0) -> None:
        """Gives the servers' optimizer what it is to remember of a key, or of the tensor of a
        bucket with this number from 1, from the states of all its servers of then, in the order of
        the elements. Raises CheckpointError for states that are
        none of this optimizer's."""


class Resuming(Generic[O]):
    """Has a store go on from a checkpoint: worker rank 0 gives its values and states to the
    servers in place of the script's, and all workers count on.

    Belongs to the script's thread.
    """

    def __init__(self, own: WorkerStore, pushes: Pushes[O], rank: int, goes_on: GoesOn[O]) -> None:
        self._own = own
        self._pushes = pushes
        self._rank = rank
        self._goes_on = goes_on
        self._counts: Optional[Counts] = None
        """Until an optimizer is set."""
        self._optimizer: Optional[O] = None
        """The one that goes on."""
        self._names = SameNames()
        """The checkpoint's and this script's."""
        self._kept: Dict[Key, Sequence[SavedState]] = {}
        """Keys whose states the servers' optimizer is still to get."""
        own.describe = self._describe
        if own.resumed is not None and own.resumed.numbers and not own.was_left:
            self._counts = _counts_in(own.resumed.numbers)

    def keep_unpushed(
        self, names: Mapping[Key, str], copies: Callable[[], List[Unpushed]]
    ) -> Set[Key]:
        """Has checkpoints keep worker rank 0's values of what no gradient changes, which `copies()`
        copies at each of them; rank 0 says so, with their names. Returns those that have no keys,
        where the job goes on from a checkpoint: their values are in it.
        """
        if self._rank == 0:
            self._own.unpushed = copies
            if names:
                _log.warning(
                    "checkpoints have worker 0's values of %s as long as no gradient changes them, "
                    "and all workers of a job that goes on begin with these",
                    some_of([repr(name) for name in names.values()]),
                )
        if self._own.resumed is None:
            return set()
        return {key for key in names if key not in self._own}

    def set_optimizer(self, fresh: O, goes_on: Optional[GoesOn[O]] = None) -> None:
        """Has the servers update by an optimizer. The first one goes on where that of the
        checkpoint was, any other begins with fresh counts and states. `goes_on` has it do so, if it
        is not one of the front end's.

        Raises NotSupportedError for one that can't run here, CheckpointError for another class than
        the checkpoint's, and for one of another rule.
        """
        self._goes_on = goes_on or self._goes_on
        check_optimizer(self._own, fresh, self._pushes.optimizer)
        self._own.optimizer_set(fresh.momentum)
        counts, self._counts = self._counts, None
        self._optimizer = None
        if counts is None:
            self._kept.clear()
            self._pushes.set_optimizer(fresh)
            return
        front_end = self._pushes.front_end
        if counts.front_end not in (None, front_end):
            raise CheckpointError(
                f"the checkpoint is of a script with {counts.front_end}, and this one trains with "
                f"{front_end}: go on with that script, or set P3KV_RESUME=0 and "
                "P3KV_CHECKPOINT_DIR to another folder"
            )
        rule = self._rule_of(fresh)
        if rule != counts.rule:
            raise CheckpointError(
                f"the checkpoint's consistency is {_named(counts.rule)}, and this script's is "
                f"{_named(rule)}; go on with the checkpoint's (P3KV_CONSISTENCY, or the rule "
                "that the script gives), or set P3KV_RESUME=0 and P3KV_CHECKPOINT_DIR to another "
                "folder"
            )
        if fresh.name != counts.optimizer:
            raise CheckpointError(
                f"the checkpoint is of the optimizer {counts.optimizer}, and this script sets "
                f"{fresh.name}; go on with the checkpoint's, or set P3KV_RESUME=0 and "
                "P3KV_CHECKPOINT_DIR to another folder"
            )
        self._optimizer = self._goes_on.optimizer(fresh, counts, self._pushes.step - counts.steps)
        self._pushes.go_on_with(self._optimizer, counts.steps)
        self._pushes.updates = dict(counts.updates)
        for key in self._own.declared():
            self.give_state(key)

    def initial(self, key: WorkerKey, member: int = 0) -> Optional[np.ndarray]:
        """On worker rank 0: the initial value of a key, or of the tensor of a bucket with this
        number from 1, of its shape, in place of the script's; None where the script's holds.

        Raises CheckpointError for a key that the checkpoint does not have, or not like this, or of
        another parameter.
        """
        saved, tensor = self._own.saved, _tensor(key, member)
        if saved is None or self._own.resumed is None or not key.size_elems:
            return None
        if self._own.was_left:
            return _newest_value(saved, tensor)
        if not self._is_in(saved, tensor):
            return None
        of_key = saved.key(key.store, tensor.key)
        self._kept[tensor.key] = of_key.states
        return of_key.value.reshape(tensor.shape or (1,))

    def initial_rows(self, key: WorkerKey) -> Optional[StoredRows]:
        """The same of a key of rows; its rows and its state are read when they are sent."""
        saved = self._own.saved
        if saved is None or not self._is_in(saved, _tensor(key)):
            return None
        rows, state = saved.rows(key.store, key.key, key.row_elems)
        self._kept[key.key] = [] if state is None else [state]
        return rows

    def _is_in(self, saved: Saved, key: _Tensor) -> bool:
        """Whether a checkpoint has a tensor. Raises CheckpointError as `initial`."""
        outline = saved.outline(key.store, key.key)
        if outline is None:
            if self._pushes.step:
                return False  # it was not there at the checkpoint either
            raise CheckpointError(
                f"the checkpoint of step {saved.step} has no {key.called}, of shape {key.shape}, "
                f"but {all_called(saved.keys(key.store))}; go on with the model that it was "
                "written of"
            )
        if outline.name is not None and key.name is not None:
            self._check_name(saved.step, NamePair(key.key, outline.name, key.name))
        theirs, ours = (outline.shape, outline.dtype), (key.shape, key.dtype)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint of step {saved.step} has {key.called} with shape {theirs[0]} and "
                f"dtype {theirs[1]}, and this script has shape {ours[0]} and dtype {ours[1]}; go "
                "on with the model that it was written of"
            )
        return True

    def give_state(self, key: WorkerKey) -> None:
        """On worker rank 0, when a key has its initial value: gives the servers' optimizer what it
        is to remember of the key, once it is set."""
        if self._optimizer is None:
            return
        for member in range(1, 1 + len(key.members)) if key.members else (0,):
            tensor = _tensor(key, member).key
            kept = self._kept.pop(tensor, ())
            states = [State(dict(one.elements), dict(one.numbers)) for one in kept]
            # Of other keys the servers had the states of an optimizer that was set before. By
            # rounds of their own, other workers may have pushed them.
            if states and (tensor in self._pushes.updates or self._own.own_rounds):
                self._goes_on.give(key, states, self._optimizer, member)

    def wait_for_states(self, barrier: Callable[[str], None]) -> None:
        """On all workers, when keys have values and states: where rounds are each worker's own,
        the first push of one could come before rank 0 has given the states of another."""
        if self._own.resumed is not None and self._own.own_rounds:
            barrier("to go on from the checkpoint")

    def _check_name(self, step: int, pair: NamePair) -> None:
        shifted = self._names.shifted
        found = self._names.contradiction(pair)
        if found:
            raise CheckpointError(
                f"the checkpoint of step {step} is of other parameters: "
                f"{both(found, 'it', 'this script')}. Go on with the model that it was written of, "
                "and make the same layers in the same order as that script"
            )
        if shifted is None and self._names.shifted is not None:
            _log.warning(
                "%s: the script has not made the same layers before. Nothing is wrong as long as "
                "such a counter differs by the same number in all names",
                both([pair], f"the checkpoint of step {step}", "this script"),
            )

    def _describe(self) -> Tuple[bool, Dict[str, Any]]:
        optimizer = self._pushes.optimizer
        if optimizer is None:
            return False, {}
        steps, updates = self._pushes.counts
        updates = dict(updates)
        for key in self._own.declared():
            if key.key in updates:
                updates.update((member.key, updates[key.key]) for member in key.members)
        return optimizer.needs_whole_tensors, {
            "optimizer": optimizer.name,
            "steps": steps,
            "updates": [[key, count] for key, count in updates.items()],
            "remembered": optimizer.remembered(),
            "rule": self._rule_of(optimizer),
            "front_end": self._pushes.front_end,
        }

    def _rule_of(self, optimizer: O) -> Optional[str]:
        """Optimizers count and remember other updates by rules that differ in this."""
        return optimizer.rule or (_EACH_PUSH if self._own.own_rounds else None)


class _Tensor(NamedTuple):
    """What checkpoints have by itself: a key, or a tensor of a bucket."""

    store: int
    key: Key
    name: Optional[str]
    called: str
    shape: Sequence[int]
    dtype: str


def _tensor(key: WorkerKey, member: int = 0) -> _Tensor:
    if not member:
        return _Tensor(key.store, key.key, key.name, key.called, key.shape, key.dtype)
    one = key.members[member - 1]
    what = called(one.key, one.name)
    return _Tensor(key.store, one.key, one.name, what, one.shape, key.dtype)


def _newest_value(saved: Saved, key: _Tensor) -> Optional[np.ndarray]:
    """That of a parameter which another store had at the checkpoint; None where none had one of
    this name and shape."""
    for store in saved.stores:
        for other in saved.keys(store.store):
            outline = saved.outline(store.store, other)
            if outline is None or key.name is None:
                continue
            if (outline.name, outline.shape, outline.dtype) == (key.name, key.shape, key.dtype):
                return saved.key(store.store, other).value.reshape(key.shape or (1,))
    return None


def _named(rule: Optional[str]) -> str:
    return rule or "a rule by which the gradients of all workers make an update"


def _counts_in(numbers: Mapping[str, Any]) -> Counts:
    try:
        updates = {key: int(count) for key, count in numbers["updates"]}
        return Counts(
            str(numbers["optimizer"]), int(numbers["steps"]), updates, dict(numbers["remembered"]),
            numbers.get("rule"), numbers.get("front_end"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not say how far its optimizer is ({error!r})"
        ) from error
