"""What MXNet's part of a checkpoint is, and how a store goes on from one."""

from __future__ import annotations

import logging
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv import config
from p3kv.checkpoints import SavedKey
from p3kv.common.naming import Pair, SameNames, both
from p3kv.errors import CheckpointError, ConfigError, StatesError
from p3kv.frontends.mxnet import saved_states
from p3kv.frontends.mxnet.arrays import ROW_SPARSE
from p3kv.frontends.mxnet.plain_states import with_all_rows
from p3kv.frontends.mxnet.unpushed import Local, copied, of_trainer
from p3kv.frontends.mxnet.worker_optimizer import WorkerOptimizer
from p3kv.server.optimizer import State
from p3kv.store.pushes import Pushes
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

_log = logging.getLogger("p3kv")

_MOST_NAMES = 6
"""In a message."""


class Counts(NamedTuple):
    """How far a store's optimizer is, as all workers know it."""

    optimizer: str
    """Name of its class."""
    steps: int
    """Its updates of the key that was updated most often."""
    updates: Dict[Key, int]
    remembered: Mapping[str, Any]
    """As `WorkerOptimizer.remembered`."""


class Resuming:
    """Has a store go on from a checkpoint: worker rank 0 gives its values and states to the
    servers in place of the script's, and all workers count on.

    Belongs to the script's thread.
    """

    def __init__(self, own: WorkerStore, pushes: Pushes[WorkerOptimizer], rank: int) -> None:
        self._own = own
        self._pushes = pushes
        self._rank = rank
        self._counts: Optional[Counts] = None
        """Until an optimizer is set."""
        self._optimizer: Optional[WorkerOptimizer] = None
        """The one that goes on."""
        self._names = SameNames()
        """The checkpoint's and this script's."""
        self._kept: Dict[Key, SavedKey] = {}
        """Keys whose states the servers' optimizer is still to get."""
        own.describe = self._describe
        if own.resumed is not None and own.resumed.numbers:
            self._counts = _counts_in(own.resumed.numbers)

    def keep_unpushed(self, source: Callable[[], List[Local]]) -> List[Local]:
        """Has checkpoints keep worker rank 0's values of what no gradient changes, which `source()`
        gives at each of them; rank 0 says so, with their names. Returns those without keys of which
        the values are in the checkpoint from which the job goes on.
        """
        now = source()
        if self._rank == 0:
            self._own.unpushed = lambda: [copied(local) for local in source()]
            if now:
                _log.warning(
                    "checkpoints have worker 0's values of %s as long as no gradient changes them, "
                    "and all workers of a job that goes on begin with these",
                    _listed([local.name for local in now]),
                )
        resumed = self._own.resumed is not None
        return [local for local in now if resumed and local.key not in self._own]

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer, fresh: WorkerOptimizer) -> None:
        """Has the servers update by an optimizer. The first one goes on where that of the
        checkpoint was, any other begins with fresh counts and states.

        Raises CheckpointError for another class than the checkpoint's.
        """
        counts, self._counts = self._counts, None
        self._optimizer = None
        if counts is None:
            self._kept.clear()
            self._pushes.set_optimizer(fresh)
            return
        name = type(optimizer).__name__
        if name != counts.optimizer:
            raise CheckpointError(
                f"the checkpoint is of the optimizer {counts.optimizer}, and this script sets "
                f"{name}; go on with the checkpoint's, or set P3KV_RESUME=0 and "
                "P3KV_CHECKPOINT_DIR to another folder"
            )
        # What was the rate of the last step follows from it.
        optimizer.num_update = optimizer.begin_num_update + counts.steps
        since_step = self._pushes.step - counts.steps
        self._optimizer = WorkerOptimizer(optimizer, since_step, counts.remembered)
        self._pushes.go_on_with(self._optimizer, counts.steps)
        self._pushes.updates = dict(counts.updates)
        for key in self._own.declared():
            self.give_state(key)

    def initial(self, key: WorkerKey, value: NDArray) -> NDArray:
        """On worker rank 0: the initial value of a key, in place of the script's `value`.

        Raises CheckpointError for a key that the checkpoint does not have, or not like this, or of
        another parameter.
        """
        saved = self._own.saved
        if saved is None or self._own.resumed is None or not key.size_elems:
            return value
        outline = saved.outline(key.store, key.key)
        if outline is None:
            if self._pushes.step:
                return value  # it was not there at the checkpoint either
            others = saved.keys(key.store)
            raise CheckpointError(
                f"the checkpoint of step {saved.step} has no {key.called}, of shape {key.shape}, "
                f"but {saved_states.named(others)}; go on with the model that it was written of"
            )
        if outline.name is not None and key.name is not None:
            self._check_name(saved.step, Pair(key.key, outline.name, key.name))
        theirs, ours = (outline.shape, outline.dtype), (key.shape, key.dtype)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint of step {saved.step} has {key.called} with shape {theirs[0]} and "
                f"dtype {theirs[1]}, and this script has shape {ours[0]} and dtype {ours[1]}; go "
                "on with the model that it was written of"
            )
        of_key = self._kept[key.key] = saved.key(key.store, key.key)
        elements = of_key.value.reshape(key.shape or (1,))
        if value.stype == ROW_SPARSE:
            return with_all_rows(elements)
        return mx.nd.array(elements, dtype=key.dtype)

    def _check_name(self, step: int, pair: Pair) -> None:
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

    def give_state(self, key: WorkerKey) -> None:
        """On worker rank 0, when a key has its initial value: gives the servers' optimizer what it
        is to remember of the key, once it is set."""
        optimizer = self._optimizer
        if optimizer is None or key.key not in self._kept:
            return
        of_key = self._kept.pop(key.key)
        states = [State(dict(one.elements), dict(one.numbers)) for one in of_key.states]
        # Of other keys the servers had the states of an optimizer that was set before.
        if states and key.key in self._pushes.updates:
            found = saved_states.of_states(states, key, optimizer)
            try:
                saved_states.check(
                    "the checkpoint", {key.key: found.state}, optimizer.optimizer, [key]
                )
            except StatesError as error:
                raise CheckpointError(str(error)) from None
            saved_states.give(self._own, [key], {key.key: found}, optimizer)

    def _describe(self) -> Tuple[bool, Dict[str, Any]]:
        optimizer = self._pushes.optimizer
        if optimizer is None:
            return False, {}
        steps, updates = self._pushes.counts
        return optimizer.needs_whole_tensors, {
            "optimizer": type(optimizer.optimizer).__name__,
            "steps": steps,
            "updates": [[key, count] for key, count in updates.items()],
            "remembered": optimizer.remembered(),
        }


def declare_now(trainer: mx.gluon.Trainer) -> None:
    """Has a Trainer declare its parameters as soon as it is made, and not in its first step: their
    values may be a checkpoint's, and the first gradient is to be that of these values.

    Raises ConfigError where a parameter has no value yet.
    """
    for parameter in trainer._params:
        if parameter._data is None:
            raise ConfigError(
                f"the parameter '{parameter.name}' has no value yet. With P3KV_CHECKPOINT_DIR a "
                "Trainer needs all values when it is made, since a checkpoint's may take their "
                "place: initialise the network, and run one forward pass if its layers find out "
                "their shapes by themselves, before you make the Trainer"
            )
    trainer._init_kvstore()
    trainer._init_params()
    trainer._kvstore.keep_unpushed(lambda: of_trainer(trainer))


def leave_out(names: Sequence[str]) -> None:
    """Says what of FeedForward's checkpoints do not have, if there are any; for worker rank 0."""
    if names and config.current().checkpoint_dir is not None:
        _log.warning(
            "checkpoints do not have the values of %s, which FeedForward keeps to itself: a job "
            "that goes on begins with the script's own. Of a Module they are in checkpoints",
            _listed(names),
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    first = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return f"{first} and {more} more" if more > 0 else first


def _counts_in(numbers: Mapping[str, Any]) -> Counts:
    try:
        updates = {key: int(count) for key, count in numbers["updates"]}
        return Counts(
            str(numbers["optimizer"]), int(numbers["steps"]), updates, dict(numbers["remembered"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not say how far its optimizer is ({error!r})"
        ) from error
