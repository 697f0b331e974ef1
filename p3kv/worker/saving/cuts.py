"""Between which steps there is a checkpoint, and what belongs to it."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Tuple,
)
from weakref import ref

import numpy as np

from p3kv.wire.messages import Key, Resumed, ResumedStore, StoreAtCut

LEFT: Mapping[str, Any] = {"left": True}
"""What checkpoints have of a store whose parameters another one has."""


class Unpushed(NamedTuple):
    """A value of worker rank 0 that no gradient changes, such as a running average."""

    key: Key
    name: str
    """User's name for it."""
    shape: Tuple[int, ...]
    dtype: str
    value: Future[np.ndarray]
    """A copy of it, as soon as the framework has computed it."""


class TrainedArray(NamedTuple):
    """A copy of an array that this worker trains by itself."""

    shape: Tuple[int, ...]
    dtype: str
    value: Future[np.ndarray]
    """As soon as the framework has computed it."""


class Trained(NamedTuple):
    """What this worker has of a key that it trains by itself."""

    key_id: int
    key: Key
    numbers: Dict[str, Any]
    """Plain values."""
    arrays: Dict[str, TrainedArray]
    """By name."""


class Cut(NamedTuple):
    """Contents of a checkpoint."""

    after: int
    """The last step whose pushes do, of those that all stores count."""
    step: int
    """Step as the script counts."""
    stores: List[StoreAtCut]
    unpushed: List[Tuple[int, Unpushed]] = []  # noqa: RUF012  nobody changes it
    """Worker rank 0's values that no gradient changes, with the store's number."""
    trained: List[Tuple[int, Trained]] = []  # noqa: RUF012  nobody changes it
    """What this worker trains by itself, with the store's number. Then nothing may be pushed for
    many steps, and the checkpoint does not wait for the next push."""

    @property
    def own(self) -> List[StoreAtCut]:
        """The stores whose rounds are each worker's own."""
        return [store for store in self.stores if store.own_rounds]


class SavedStore(Protocol):
    """A store that checkpoints have."""

    unpushed: Callable[[], List[Unpushed]]
    """Copies what no gradient of its keys changes."""
    trained: Callable[[], List[Trained]]
    """Copies what this worker trains by itself."""

    def at_cut(self) -> StoreAtCut:
        """What it is between two steps."""


class Cuts:
    """Says between which steps there is a checkpoint. Belongs to the thread that uses the stores.

    Where several stores take turns, as for a GAN, a checkpoint is before a step of the store that
    leads: the one that has made the first step. So all have made the same number of iterations.
    Another leads when it steps and the one that led does not any more.
    """

    def __init__(self, every: int) -> None:
        """`every`: how many steps of the store that leads."""
        self._every = every
        self._stores: List[Optional[ref[SavedStore]]] = []
        """Those that are there: of one that is garbage, or left, checkpoints have nothing."""
        self._staying: List[SavedStore] = []
        """Those that checkpoints have for ever."""
        self._left: Dict[int, int] = {}
        """By store whose parameters another has taken over: how many steps it made."""
        self._copies: Optional[List[Tuple[int, Unpushed]]] = None
        """Values at the newest step's end, if there may be a checkpoint now."""
        self._steps: Dict[int, int] = {}
        """By store: the number of its steps, in this run and before it."""
        self._step = 0
        """Counts the steps of all stores, in this run and before it."""
        self._held: Dict[int, SavedStore] = {}
        """Where a checkpoint may follow the newest step: the stores of the newest iteration, in the
        order of their steps. The script may end now, and have nothing of its stores any more."""
        self._leader: Optional[int] = None
        self._followed: Dict[int, int] = {}
        """By store: its steps since the last one of the store that leads."""
        self.count = 0
        """How many checkpoints were due."""
        self.of_all_workers = False
        """Whether each worker takes part in checkpoints."""

    def add(self, store: SavedStore, stays: bool, resumed: Resumed) -> Optional[ResumedStore]:
        """Add the next store, as long as it is there, or for ever if it `stays`; return what it is
        in the checkpoint from which the job goes on."""
        number = len(self._stores)
        if self._held:  # and the script goes on: those that only this has are cycles
            self._held = {}
            gc.collect()
        if not number:
            self._step = resumed.step
        self._stores.append(ref(store))
        if stays:
            self._staying.append(store)
        return next((one for one in resumed.stores if one.store == number), None)

    def leave(self, store: int, steps: int) -> None:
        """Later checkpoints have only a store's number of steps: another one has its parameters.
        All workers say so between the same steps."""
        self._left[store] = steps
        self._stores[store] = None
        self._held.pop(store, None)
        self._steps.pop(store, None)
        if self._leader == store:
            self._leader = None

    def _saved(self) -> Iterator[Tuple[int, SavedStore]]:
        """The stores that a checkpoint contains, with their numbers."""
        for number, reference in enumerate(self._stores):
            store = None if reference is None else reference()
            if store is not None:
                yield number, store

    def due(self, store: int, steps: int) -> Optional[int]:
        """The step of the checkpoint that is due before a store's next step, or None; `steps`: how
        many it has made, in this run and before."""
        due = self._due(store, steps)
        held, its = self._held, dict(self._saved()).get(store)
        while store in held:  # what has not stepped since belongs to an older iteration
            held = {one: held[one] for one in [*held][1:]}
        if not self.may_be_due():
            held = {}
        elif its is not None:
            held = {**held, store: its}
        self._held = held
        return due

    def holds(self, store: int) -> bool:
        """Whether a store that nobody has any more is still needed; from any thread."""
        return store in self._held

    def _due(self, store: int, steps: int) -> Optional[int]:
        self._steps[store] = steps + 1
        step, self._step = self._step, self._step + 1
        is_first = self._leader is None
        if is_first or self._followed.get(store, 0) >= self._every:
            self._leader = store
        if store != self._leader:
            self._followed[store] = self._followed.get(store, 0) + 1
            return None
        self._followed.clear()
        if is_first or steps % self._every:
            return None  # the first step is where the run begins
        self.count += 1
        return step

    def due_at_end(self) -> Optional[int]:
        """The step of the checkpoint that is due after the script's last step, once, or None."""
        leader, self._leader = self._leader, None
        if leader is None or not self._held:
            return None
        if self._steps[leader] % self._every:
            return None
        self.count += 1
        return self._step

    def may_be_due(self, steps: int = 1) -> bool:
        """Whether one of the next so many steps may be one before which there is a checkpoint."""
        return any(self._may_be_before(store, steps) for store in self._steps)

    def waits(self, store: int) -> bool:
        """Whether a store may push nothing of its next step yet: a checkpoint before another
        store's next step would lack its part of that iteration."""
        return self.may_be_due() and not self._may_be_before(store)

    def _may_be_before(self, store: int, steps: int = 1) -> bool:
        leads = store == self._leader or self._followed.get(store, 0) >= self._every
        return leads and -self._steps.get(store, 1) % self._every < steps

    def step_ended(self) -> None:
        """Copy what no gradient changes, at a step's end: the next forward pass changes running
        averages."""
        self._copies = self._all_unpushed() if self.may_be_due() else None

    def cut(self, after: int, step: int) -> Cut:
        """All stores as they are now, between two steps; `step` is the one that `due` has said."""
        unpushed = self._all_unpushed() if self._copies is None else self._copies
        stores = list(self._saved())
        trained = [(number, one) for number, store in stores for one in store.trained()]
        at_cut = [store.at_cut() for _, store in stores]
        for number, steps in self._left.items():
            at_cut.append(StoreAtCut(ResumedStore(number, steps, dict(LEFT)), False, []))
        return Cut(after, step, at_cut, unpushed, trained)

    def _all_unpushed(self) -> List[Tuple[int, Unpushed]]:
        return [(number, one) for number, store in self._saved() for one in store.unpushed()]
