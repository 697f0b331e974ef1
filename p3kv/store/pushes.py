"""Round and step of each push of a store, and what the servers are told before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import nullcontext
from typing import (
    Any,
    Collection,
    ContextManager,
    Dict,
    Generic,
    List,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from p3kv.store.clipped_steps import ClippedSteps
from p3kv.store.forward_order import OrderLearner
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class ScriptOptimizer(ABC):
    """The optimizer that a script has set, and what the servers must be told of it and when.

    Every worker has one, so that all know what the servers need. Belongs to the script's thread.
    """

    name: str
    """Name of its class, for messages and checkpoints."""
    needs_whole_tensors = False
    """Whether it updates tensors as a whole, and not slices."""
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


class Checks(ABC, Generic[O]):
    """Refusals of a front end, in its users' words: each method raises NotSupportedError."""

    @abstractmethod
    def first_push(self, key: WorkerKey, optimizer: Optional[O]) -> None:
        """Where a key can't be pushed at all."""

    @abstractmethod
    def lacks_gradient(self, key: WorkerKey, optimizer: O) -> None:
        """The next update by this optimizer depends on whether any worker has a gradient of this
        key, and this one has none."""

    @abstractmethod
    def clips_without_optimizer(self) -> None:
        """Steps are to be clipped, and the servers have no optimizer."""

    @abstractmethod
    def part_of_a_step(self, keys: Any) -> NoReturn:
        """Keys are pushed after their step has been clipped without them."""


class Pushes(Generic[O]):
    """Counts a store's pushes, and keeps the servers' optimizer like the script's between steps.

    A key that has been pushed in every step so far begins a new one with its next push. Belongs to
    the script's thread.
    """

    def __init__(
        self, own: WorkerStore, order: OrderLearner, rank: int, front_end: str, checks: Checks[O]
    ) -> None:
        """Worker rank 0 tells the servers, of which front end the settings are; all workers
        count."""
        self._own = own
        self._front_end = front_end
        self._checks = checks
        self._order = order
        self._rank = rank
        self.optimizer: Optional[O] = None
        """The servers', as the script has set it."""
        self._shares_numbers = False
        self.updates: Dict[Key, int] = {}
        """How often the optimizer has updated each key, without its `begin_num_update`. Until the
        next step, or `settle`, pushes of which this worker had no gradient count."""
        self._unknown: List[Tuple[Key, Future[bool]]] = []
        """These pushes, and whether another worker had a gradient."""
        self._settled_steps = 0
        """The value of `_steps` before them."""
        self._counts_step = True
        """Whether this worker has a gradient by which the optimizer's count of steps advances."""
        self._behind = 0
        """By how much that count is less than the number of steps, in this step."""
        self._steps = 0
        """Counts the steps of this store. What else says step counts those of all stores."""
        self.step = 0
        """This store's newest one."""
        self._marked = False
        """Whether a step begins with the next push, as the front end says."""
        self._since = 0
        """The value of `_steps` when the optimizer was set."""
        self.clipping = ClippedSteps(own, checks.part_of_a_step)
        self._says_steps = False
        """Whether the script says where steps are, and does not call the store itself."""
        self._begins = False

    def check(self, key: WorkerKey) -> None:
        """Raises NotSupportedError for a key that can't be pushed; `next` does so, too."""
        if key.key not in self.updates:
            self._checks.first_push(key, self.optimizer)

    def next(self, key: WorkerKey, changes: Optional[Future[bool]] = None) -> Tuple[int, int]:
        """Counts a push: the key's round, and the step that an optimizer would count.

        `changes`: of a push without a gradient, whether another worker has one.
        """
        if changes is not None and self._shares_numbers:
            assert self.optimizer is not None
            self._checks.lacks_gradient(key, self.optimizer)
        updates = self.updates.get(key.key, 0) + 1
        if updates == 1:
            self._checks.first_push(key, self.optimizer)
        is_new_step = self._since + updates > self._steps
        if self._begins or (is_new_step and not self._says_steps):
            self._begins = False
            self._own.step_begins()  # before anything counts
        if changes is not None:  # not before: who counts updates waits for what is unknown
            self._unknown.append((key.key, changes))
        self.updates[key.key] = updates
        key.round += 1
        if is_new_step:
            self._steps += 1
            self._behind = 0 if self._counts_step else 1
        if self.clipping.clips:
            self._join_clipped_step(key, is_new_step)
        elif is_new_step or self._own.was_cut or (self._marked and self._settings_changed()):
            self._marked = False
            self.step = self._own.new_step()
            self._begin_step()
        if self._shares_numbers:
            assert self.optimizer is not None
            self._tell_servers(self.step, self.optimizer.shared_number(key.key, updates))
        self._own.pushed(self.step)
        self._order.pushed(key.key)
        return key.round, self.step

    def one_step(self, fresh: Optional[Collection[Key]] = None) -> ContextManager[None]:
        """Groups the pushes inside into one step: for clipping, for settings that have changed and
        for checkpoints. Nothing that waits for a new value may be inside. `fresh`: the keys of
        which this worker has a gradient, unless that is all."""
        self.settle()
        self._behind = 0
        self._counts_step = fresh is None or any(
            self._since + self.updates.get(key, 0) + 1 > self._steps for key in fresh
        )
        self._settled_steps = self._steps
        self._says_steps = self._begins = True
        if self.clipping.clips:
            return self.clipping.one_step()
        self._marked = True
        return nullcontext()

    def begin_clipped_call(self, known: Sequence[Tuple[Any, ...]]) -> None:
        """To be called before keys are pushed while steps are clipped; `known` has the keys first.

        Raises NotSupportedError where the call can't be a step that is clipped.
        """
        if self.optimizer is None:
            self._checks.clips_without_optimizer()
        keys = [key.key for key, *_ in known]

        def is_new_step() -> bool:
            most = max((self.updates.get(key, 0) for key in keys), default=self._steps)
            return self._since + most + 1 > self._steps

        self.clipping.begin_call(is_new_step, keys)

    # The optimizer.

    def settle(self) -> None:
        """Waits for the rounds of which this worker had no gradient, and takes back what was
        counted of those that have changed nothing: in one process, there is no update then."""
        if not self._unknown:
            return
        unknown, self._unknown = self._unknown, []
        for key, changes in unknown:
            if not changes.result():
                self.updates[key] -= 1
                if not self.updates[key]:
                    del self.updates[key]
        most = max(self.updates.values(), default=0)
        self._steps = max(self._settled_steps, self._since + most)

    @property
    def counts(self) -> Tuple[int, Dict[Key, int]]:
        """How many steps the optimizer has made, and how often it has updated each key."""
        self.settle()
        return self._steps - self._since, self.updates

    def set_optimizer(self, optimizer: O) -> None:
        """Has the servers update by an optimizer from the next step on, with fresh counts."""
        self.settle()
        self.optimizer = optimizer
        self._shares_numbers = optimizer.shares_numbers
        self.updates.clear()
        self._since = self._steps
        self._tell_servers(self.step + 1, optimizer.settings)

    def go_on_with(self, optimizer: O, steps: int) -> None:
        """Has the servers go on with an optimizer that has made so many steps in another training;
        the caller gives them its states.
        """
        self.settle()
        self._since = self._steps - steps
        self.optimizer = optimizer
        self._shares_numbers = optimizer.shares_numbers
        self._tell_servers(self.step + 1, optimizer.settings)

    def _begin_step(self) -> None:
        """Once a step, before its first slice: rank 0 publishes the order and new settings."""
        self._order.begin_step(self._steps)
        if self.optimizer is not None:
            updates = self._steps - self._since - self._behind
            self._tell_servers(self.step, self.optimizer.begin_step(self.step, updates))

    def _tell_servers(self, from_step: int, settings: Optional[bytes]) -> None:
        """Worker rank 0 sends optimizer settings, if there are new ones, for a step and on."""
        if settings is not None and self._rank == 0:
            self._own.set_optimizer(from_step, self._front_end, settings)

    def _settings_changed(self) -> bool:
        """For the first push of a step, which is of a key that is trained seldom: whether it needs
        a number of its own, because the optimizer's settings are not those of the step before."""
        self._marked = False
        return self.optimizer is not None and self.optimizer.has_changed()

    def _join_clipped_step(self, key: WorkerKey, is_new_step: bool) -> None:
        """All pushes of a clipped step have the same number of the step, also where the first of
        its keys is trained seldom."""
        begins = self.clipping.begins_with(key)
        if begins:
            self.step = self._own.new_step()
            self.clipping.begin(self.step)
        if begins or is_new_step:
            self._begin_step()
        self.clipping.add(key)
