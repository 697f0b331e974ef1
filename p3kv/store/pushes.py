"""Round and step of each push of a store, and what the servers are told before it."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Generic,
    List,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

from p3kv.store.checks import check_clipping, check_first_push, check_no_gradient
from p3kv.store.clipped_steps import ClippedSteps
from p3kv.store.forward_order import OrderLearner
from p3kv.store.script_optimizer import O
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class Pushes(Generic[O]):
    """Counts a store's pushes, and keeps the servers' optimizer like the script's between steps.

    A key that has been pushed in every step so far begins a new one with its next push. Belongs to
    the script's thread.
    """

    def __init__(
        self,
        own: WorkerStore,
        order: OrderLearner,
        rank: int,
        front_end: str,
        refuse_part: Callable[[Any], NoReturn],
    ) -> None:
        """Worker rank 0 tells the servers the settings and their front end; all workers count.
        `refuse_part(keys)` raises NotSupportedError: they are of a step that was clipped without
        them."""
        self._own = own
        self._refuse_part = refuse_part
        self.front_end = front_end
        self._order = order
        self._rank = rank
        self.optimizer: Optional[O] = None
        """The servers', as the script has set it."""
        self._shares_numbers = False
        self.updates: Dict[Key, int] = {}
        """How often the optimizer has updated each key, without its `begin_num_update`. Pushes
        without a gradient count until it is known whether another worker had one."""
        self._unknown: List[Tuple[Key, Future[bool]]] = []
        """These pushes, and whether another worker had a gradient."""
        self._known_steps = 0
        """The value of `_steps` before the first of them."""
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
        self._owes_settings = False
        """Whether the servers hold rounds of workers' own until this store's next step begins."""
        self.clipping = ClippedSteps(own)
        self.marks_steps = False
        """Whether, without an optimizer, each step that the front end marks has a number of its
        own. To be set by the front end."""
        self._says_steps = False
        """Whether the script says where steps are, and does not call the store itself."""
        self._begins = False

    def check(self, key: WorkerKey) -> None:
        """Raises NotSupportedError for a key that can't be pushed; `next` does so, too."""
        if key.key not in self.updates:
            check_first_push(self._own, key, self.optimizer)

    def next(self, key: WorkerKey, changes: Optional[Future[bool]] = None) -> Tuple[int, int]:
        """Count a push; return its round, and the optimizer's step. `changes`: of a push without a
        gradient, whether another worker has one."""
        if changes is not None and self._shares_numbers:
            assert self.optimizer is not None
            check_no_gradient(self._own, key, self.optimizer)
        is_new_step, optimizer = self._begins, self.optimizer
        marks = self.marks_steps if optimizer is None else not optimizer.counts_updates
        if not (marks and self._says_steps):
            is_new_step = self._is_in_all_steps(key.key)
        self.check(key)
        if self._begins or (is_new_step and not self._says_steps):
            self._begins = False
            self._own.step_begins()  # before anything counts
        if changes is not None:  # not before: who counts updates waits for what is unknown
            self._unknown.append((key.key, changes))
        updates = self.updates[key.key] = self.updates.get(key.key, 0) + 1
        key.round += 1
        key.own_step = self._own.steps
        if self._own.may_be_cut:
            key.exact_round = key.round
        if is_new_step:
            self._steps += 1
            self._behind = 0 if self._counts_step else 1
        if self.clipping.clips:
            self._join_clipped_step(key, is_new_step)
        elif (
            is_new_step
            or self._owes_settings
            or self._own.was_cut
            or (self._marked and self._settings_changed())
        ):
            self._marked = False
            self.step = self._own.new_step()
            self._begin_step()
        if self._shares_numbers:
            assert self.optimizer is not None
            self._tell_servers(self.step, self.optimizer.shared_number(key.key, updates))
        if self.optimizer is not None:
            self.optimizer.note_updates(key.key, updates)
        self._own.count_push(self.step)
        self._order.note_push(key.key)
        return key.round, self.step

    def one_step(self, fresh: Optional[Collection[Key]] = None) -> ContextManager[None]:
        """Group the pushes inside into one step, for clipping, changed settings and checkpoints;
        nothing inside may wait for a new value. `fresh`: the keys of which this worker has a
        gradient; None: all."""
        self._count_known()
        self._behind = 0
        self._counts_step = True
        if fresh is not None:
            if self._unknown and self._least_steps() < self._steps:
                self.wait_for_unknown()
            self._counts_step = any(map(self._is_in_all_steps, fresh))
        if not self._unknown:
            self._known_steps = self._steps
        self._says_steps = self._begins = True
        if self.clipping.clips:
            return self.clipping.one_step()
        self._marked = True
        return nullcontext()

    def begin_own_step(self) -> None:
        """A worker that trains by itself begins a step, before anything changes: there may be a
        checkpoint of all before. What is pushed in it has a later step than any before."""
        self._says_steps = self._marked = True
        self._own.step_begins()
        self._own.begin_local_step()

    def begin_exchange(self) -> None:
        """Workers that train by themselves exchange all between two steps, as a step of its own."""
        self._says_steps = self._marked = True

    def begin_clipped_call(self, known: Sequence[Tuple[Any, ...]]) -> None:
        """Keys are to be pushed while steps are clipped; `known` has them first. NotSupportedError
        where the call can't be a clipped step."""
        if self.optimizer is None:
            check_clipping(self._own)
        if self.clipping.begin_call():
            keys = [key.key for key, *_ in known]
            most = max((self.updates.get(key, 0) for key in keys), default=self._steps)
            if self._since + most + 1 <= self._steps:  # none was pushed in every step so far
                self._refuse_part(keys)

    # The optimizer.

    def wait_for_unknown(self) -> None:
        """Wait for the rounds in which this worker had no gradient, and take back the counts of
        those that changed nothing: one process would not have updated."""
        for _, changes in self._unknown:
            changes.result()
        self._count_known()

    def _count_known(self) -> None:
        """The same without a wait: by some rules the next steps begin before these rounds end."""
        if not self._unknown:
            return
        unknown, self._unknown = self._unknown, []
        for key, changes in unknown:
            if not changes.done():
                self._unknown.append((key, changes))
            elif not changes.result():
                self.updates[key] -= 1
                if not self.updates[key]:
                    del self.updates[key]
                if self.optimizer is not None:
                    self.optimizer.note_updates(key, self.updates.get(key, 0))
        most = max(self.updates.values(), default=0)
        self._steps = max(self._known_steps, self._since + most)

    def _is_in_all_steps(self, key: Key) -> bool:
        """Whether a key was updated in every step, so that its next push begins one. Waits only
        where rounds without a gradient decide that: all workers must find the same."""
        updates = self._since + self.updates.get(key, 0)
        unknown = sum(one == key for one, _ in self._unknown) if updates >= self._steps else 0
        if unknown and updates - unknown < self._steps:
            self.wait_for_unknown()
            updates = self._since + self.updates.get(key, 0)
        return updates >= self._steps

    def _least_steps(self) -> int:
        """How many steps there were, if all that is unknown has changed nothing."""
        unknown = Counter(key for key, _ in self._unknown)
        most = max((count - unknown[key] for key, count in self.updates.items()), default=0)
        return max(self._known_steps, self._since + most)

    @property
    def counts(self) -> Tuple[int, Dict[Key, int]]:
        """How many steps the optimizer has made, and how often it has updated each key."""
        self.wait_for_unknown()
        return self._steps - self._since, self.updates

    def set_optimizer(self, optimizer: O) -> None:
        """Has the servers update by an optimizer from the next step on, with fresh counts."""
        self.wait_for_unknown()
        self.optimizer = optimizer
        self._shares_numbers = optimizer.shares_numbers
        self.updates.clear()
        self._since = self._steps
        self._announce(optimizer)

    def go_on_with(self, optimizer: O, steps: int) -> None:
        """Have the servers go on with an optimizer of so many steps; the caller gives its
        states."""
        self.wait_for_unknown()
        self._since = self._steps - steps
        self.optimizer = optimizer
        self._shares_numbers = optimizer.shares_numbers
        self._announce(optimizer)

    def _announce(self, optimizer: O) -> None:
        """Announce the optimizer before its first step, with which come settings such as a
        scheduler's rate; another worker's push that is an update by itself waits for these."""
        self._owes_settings = self._own.own_rounds
        self._tell_servers(self.step + 1, optimizer.settings, in_step=not self._owes_settings)

    def _begin_step(self) -> None:
        """Once a step, before its first slice: rank 0 publishes the order and new settings."""
        self._order.begin_step(self._steps)
        if self.optimizer is not None:
            updates = self._steps - self._since - self._behind
            settings = self.optimizer.begin_step(self.step, updates)
            if self._owes_settings:
                self._owes_settings = False
                settings = self.optimizer.settings
            self._tell_servers(self.step, settings)

    def _tell_servers(
        self, from_step: int, settings: Optional[bytes], in_step: bool = True
    ) -> None:
        """Worker rank 0 sends optimizer settings, if there are new ones, for a step and on."""
        if settings is not None and self._rank == 0:
            assert self.optimizer is not None
            front_end = self.optimizer.front_end or self.front_end
            self._own.set_optimizer(from_step, front_end, settings, in_step)

    def _settings_changed(self) -> bool:
        """Whether a step whose first push is of a seldom trained key needs a number of its own,
        because the settings have changed."""
        self._marked = False
        return self.optimizer is not None and self.optimizer.has_changed()

    def _join_clipped_step(self, key: WorkerKey, is_new_step: bool) -> None:
        """All pushes of a clipped step have one number, even if its first key is seldom trained."""
        begins = self.clipping.begins_with(key)
        if begins:
            self.step = self._own.new_step()
            self.clipping.begin(self.step)
        if begins or is_new_step:
            self._begin_step()
        self.clipping.add(key)
