"""Buffers of a model, such as BatchNorm's running statistics: no gradient changes them, and all
workers have the same."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from functools import partial
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Optional,
    Protocol,
    Set,
    Tuple,
    Union,
)
from weakref import WeakKeyDictionary, WeakSet

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name then
import numpy as np
import torch

from p3kv.common.registry import Choice
from p3kv.common.words import some_of
from p3kv.errors import CheckpointError, NotSupportedError
from p3kv.frontends.torch.buffer_places import (
    AVERAGE,
    BROADCAST,
    IN_FORWARD,
    LEFT,
    OWN,
    OWNS,
    Memory,
    Place,
    called,
    flat,
    packed,
    travelling,
    write,
)
from p3kv.frontends.torch.optimizers.script_optimizer import TorchGoesOn, TorchScriptOptimizer
from p3kv.frontends.torch.script_marks import may_begin_forward
from p3kv.frontends.torch.values.bucket import Arriving
from p3kv.frontends.torch.values.copies import Copies
from p3kv.frontends.torch.values.devices import Devices
from p3kv.frontends.torch.values.early import forget_with
from p3kv.frontends.torch.values.watched import Watcher, unwatch, watch
from p3kv.store.client import Client
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.saving.cuts import Unpushed
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Pull, Push, WorkerKey
from p3kv.worker.worker import Worker

_log = logging.getLogger("p3kv")
_ALL_PUSH = "bulk_synchronous"
"""The rule of buffers."""


class User(Protocol):
    """What pushes buffers."""

    @property
    def weights(self) -> Iterable[torch.Tensor]: ...


class Alias(Watcher):
    """A buffer that has memory of weights: whoever reads it waits for them."""

    def __init__(self, place: Place, weights: List[Tuple[Watcher, torch.Tensor]]) -> None:
        """`weights`: each with what waits for its value."""
        self._place = place
        self._weights = weights
        self._late: Optional[torch.Tensor] = None
        """The buffer while it waits."""
        self._taking = threading.Lock()

    def arm(self) -> None:
        """From now on, whoever reads the buffer waits."""
        with self._taking:
            buffer = self._place.tensor
            if buffer is not self._late:
                self._end()
                self._late = buffer
                watch(self, (buffer,))

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        for watcher, weight in self._weights:
            watcher.take(weight)
        with self._taking:
            self._end()

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        may_begin_forward()
        self.take()

    def _end(self) -> None:
        if self._late is not None:
            unwatch(self, (self._late,))
            self._late = None


class Buffers:
    """Has a model's buffers travel after each step of its optimizers, for the script's thread.

    `broadcast`: all have worker 0's; `IN_FORWARD`: by `push_owed`. `average`: the mean of numbers
    with a fraction, worker 0's of others. `own`: each its own. All begin with worker 0's, but by
    `LEFT`, and checkpoints have these.
    """

    def __init__(
        self, places: List[Place], how: str, worker: Worker, model: WorkerStore, devices: Devices,
        gives: bool = True,
    ) -> None:  # fmt: skip
        """Give all workers rank 0's buffers, if it `gives` any, or a checkpoint's, which must have
        them. `model`: the parameters' store."""
        self._how = how
        self._worker = worker
        self._step = 0
        """That of the last push."""
        self._users: WeakSet[User] = WeakSet()
        """What pushes them."""
        self._is_chosen = False
        """Whether the script has said how they travel."""
        # All workers push for a round, also where those of parameters are each worker's own.
        client: Client[TorchScriptOptimizer] = Client("torch", TorchGoesOn, _ALL_PUSH)
        own, resuming = client.own, client.resuming  # what its pushes count says nothing here
        self._own = own
        own.choose_gradient_codec(Choice("identity"))
        if model.resumed is not None and own.resumed is None and not model.was_left:
            raise CheckpointError(
                "the checkpoint has no buffers, such as BatchNorm's running statistics, and the "
                "model has some; go on with the model that it was written of"
            )
        self._packs = [
            Pack(
                own.declare(at, (elems,), name_of(dtype), called(together), "dense"),
                dtype,
                together,
                devices.copies(together[0].device),
            )
            for at, (dtype, elems, together) in enumerate(packed(places))
        ]
        if worker.rank == 0:
            own.unpushed = self._copied
        self._called: Set[torch.nn.Module] = set()
        """Modules that are kept until the buffers that they owe have been pushed."""
        for place in places:
            if (module := place.of()) is not None:
                _KEPT.setdefault(module, {})[place.attribute] = self
        forget_with(self, worker, own.number, self._packs)
        for pack in self._packs:
            saved = resuming.initial(pack.key) if worker.rank == 0 else None
            if saved is not None:
                pack.fill(tensor_of(saved))
            if (gives and how != LEFT) or worker.rank == 0 or own.resumed is not None:
                pack.give_initial(worker)
        self.wait()

    def join(self, user: User, how: str, chosen: bool, gives: bool) -> None:
        """Has one more optimizer's steps push the buffers, which are `how` if that was `chosen`.
        `gives`: all get worker rank 0's again. NotSupportedError where they travel otherwise."""
        is_free = not self._users or (self._how == OWN and how != OWN and not self._is_chosen)
        if how != self._how and is_free:
            self._how = how  # as no step pushes them
        if chosen and how != self._how:
            raise NotSupportedError(
                f"buffers={how!r}, and an earlier p3kv.torch.Optimizer of the model has "
                f"buffers={self._how!r}: a model's buffers travel in one way, whichever optimizer "
                "steps. Give both the same"
            )
        self._is_chosen |= chosen
        if gives and self._how != LEFT:
            self._push(lambda pack: False)
            self.wait()
        self._users.add(user)

    def stay(self, user: User) -> None:
        """Has one more push them, in place of an older one, which is to leave."""
        self._users.add(user)

    def leave(self, user: User) -> None:
        """An optimizer pushes them no more."""
        self.wait()
        self._users.discard(user)

    @property
    def goes_on(self) -> bool:
        """Whether the model has all of them as they were. If it has, its next optimizer goes on
        with them: when the last one goes, each worker's own garbage collection decides."""
        places = [place for pack in self._packs for place in pack._places]
        return bool(places) and all(place.is_as_it_was for place in places)

    def give_up(self) -> None:
        """Others have them travel, from the pass on that is to begin with worker 0's."""
        self.wait()
        self._packs = []
        self._owe_nothing()

    def _owe_nothing(self) -> None:
        self._called.clear()
        _owed.pop(self, None)

    def push(self, step: int, giver: Optional[int]) -> None:
        """At the end of a step: gives all workers the mean or worker `giver`'s buffers. Without a
        giver they are worker 0's, and may be for `push_owed`."""
        self._step = max(self._step, step)
        if self._how not in OWNS and not (self._how == IN_FORWARD and giver is None):
            averages = self._how == AVERAGE
            self._push(lambda pack: averages and pack.dtype.is_floating_point, giver or 0)

    def owe(self, model: int) -> None:
        """A model's forward pass may have them be each worker's own; when its next one begins, they
        are worker 0's again."""
        if self._how == IN_FORWARD:
            if self not in _owed:
                modules = (place.of() for pack in self._packs for place in pack._places)
                self._called = {module for module in modules if module is not None}
            _owed.setdefault(self, set()).add(model)

    def owe_not(self, model: int) -> None:
        """A model's next forward pass begins with each worker's own after all."""
        models = _owed.get(self, set())
        models.discard(model)
        if not models:
            self._owe_nothing()

    def are_of(self, module: torch.nn.Module) -> bool:
        """Whether some are a module's."""
        its = {*map(id, module.buffers())}
        return any(id(place.tensor) in its for pack in self._packs for place in pack._places)

    @property
    def are_one_worker_s(self) -> bool:
        """Whether all have those of one worker."""
        return self._how in (BROADCAST, IN_FORWARD) or (
            self._how == AVERAGE and not all(one.dtype.is_floating_point for one in self._packs)
        )

    def _push(self, averages: Callable[[Pack], bool], giver: int = 0, takes: bool = True) -> None:
        for pack in self._packs:
            pack.take()
            self._own.count_push(self._step)
            pack.push(self._worker, self._step, averages(pack), giver, self._weights, takes)

    def _weights(self) -> Memory:
        return Memory(one for user in self._users for one in user.weights)

    def wait(self) -> None:
        """Waits until all buffers are there."""
        for pack in self._packs:
            pack.take()

    def _copied(self) -> List[Unpushed]:
        """Copies for a checkpoint, unless servers have these values."""
        return [] if self._how == BROADCAST else [pack.copied() for pack in self._packs]


_KEPT: WeakKeyDictionary[torch.nn.Module, Dict[str, Buffers]] = WeakKeyDictionary()
"""By a module and the attribute: what has the buffer travel."""


def kept(place: Place) -> Optional[Buffers]:
    """What has a buffer travel, if the model has all that go together as they were."""
    module = place.of()
    found = None if module is None else _KEPT.get(module, {}).get(place.attribute)
    return found if found is not None and found.goes_on else None


_owed: Dict[Buffers, Set[int]] = {}
"""Those that are to be pushed, and the models that were called since; also where these are gone:
another worker may have pushed them in a forward pass that it has made alone."""


def push_owed_of(module: torch.nn.Module) -> None:
    """Push what waits for a forward pass of a module: another optimizer is to have its buffers, and
    when an older one goes, only each worker's own garbage collection knows."""
    push_owed([one for one in _owed if one.are_of(module)])


def push_owed(
    those: Optional[Collection[Buffers]] = None,
    model: Optional[int] = None,
    is_last: bool = False,
    giver: int = 0,
) -> None:
    """Push what waits for a forward pass: of `those`, that of a `model` of theirs begins, or none
    may on all workers. `is_last`: the process ends, and does not wait for any worker. `giver`: the
    worker whose buffers all get."""
    owed = [
        one
        for one, called in _owed.items()
        if those is None or not one._users or (one in those and (model is None or model in called))
    ]
    for buffers in sorted(owed, key=lambda one: one._own.number):
        # Of those that nobody uses here no pass begins any more, and worker 0 may give late.
        buffers._push(lambda pack: False, giver, takes=bool(buffers._users) and not is_last)
        buffers._owe_nothing()


class Untrained:
    """Parameters that no optimizer has: all begin with worker rank 0's, which checkpoints have."""

    def __init__(
        self,
        places: List[Place],
        first_key: int,
        worker: Worker,
        own: WorkerStore,
        devices: Devices,
    ) -> None:
        """Give all workers rank 0's values. Their keys in the optimizer's store begin with
        `first_key`. Raises CheckpointError for other parameters than a checkpoint has."""
        self._places = places
        if own.resumed is not None and not own.was_left:
            self._fill(own)
        packs = [
            Pack(
                own.declare(
                    first_key + at, (elems,), name_of(dtype), called(together), beside=True
                ),
                dtype,
                together,
                devices.copies(together[0].device),
            )
            for at, (dtype, elems, together) in enumerate(packed(places))
        ]
        for pack in packs:
            pack.give_initial(worker)
        for pack in packs:
            pack.take()

    def copied(self, trained: Collection[int]) -> List[Unpushed]:
        """Copies for a checkpoint of those that are not `trained` now, by id."""
        copies = []
        for place in self._places:
            if id(place.tensor) not in trained:
                value: Future[np.ndarray] = Future()
                values = travelling(place.tensor).clone()
                value.set_result(_array(values))
                dtype = name_of(values.dtype)
                copies.append(Unpushed(place.name, place.name, tuple(values.shape), dtype, value))
        return copies

    def _fill(self, own: WorkerStore) -> None:
        """On worker rank 0: writes the checkpoint's values."""
        saved, lacks = own.saved, []
        if saved is None:
            return
        for place in self._places:
            outline = saved.outline(own.number, place.name)
            if outline is None:
                lacks.append(place.name)
                continue
            value = travelling(place.tensor)
            theirs, ours = (
                (outline.shape, outline.dtype),
                (tuple(value.shape), name_of(value.dtype)),
            )
            if theirs != ours:
                raise CheckpointError(
                    f"the checkpoint of step {saved.step} has the parameter '{place.name}' with "
                    f"shape {theirs[0]} and dtype {theirs[1]}, and this script has shape {ours[0]} "
                    f"and dtype {ours[1]}; go on with the model that it was written of"
                )
            write(tensor_of(saved.key(own.number, place.name).value).to(place.device), place.tensor)
        if lacks:
            _log.warning(
                "the checkpoint has no values of %s, which the optimizer does not have: all "
                "workers begin with worker 0's",
                some_of([repr(name) for name in lacks]),
            )


class Pack(Arriving):
    """Some buffers of a dtype, one after the other, under one key."""

    def __init__(
        self, key: WorkerKey, dtype: torch.dtype, places: List[Place], copies: Copies
    ) -> None:
        super().__init__(key, copies, copies.empty((key.size_elems,), dtype))
        self.device = places[0].device
        self.dtype = dtype
        """As it travels."""
        self._sent: Optional[torch.Tensor] = None
        """The last value that this worker has sent for all."""
        self._places = places
        self._before = [place.tensor for place in places]
        self._elems = [flat(one).numel() for one in self._before]
        self._aliases: Set[int] = set()
        """Ids of those that are aliases of weights."""
        self._late: List[Optional[torch.Tensor]] = []
        """While values are under way: the buffers to which they are, in their order."""
        self._copies: List[Future[np.ndarray]] = []
        """To be made when they are there."""
        self._divisor = 1

    def gathered(self) -> torch.Tensor:
        """A copy of the buffers' values as they travel."""
        return torch.cat([travelling(place.tensor) for place in self._places])

    def unless_sent(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        """Values that are to be sent for all; None if they are what was sent last."""
        if self._sent is not None and torch.equal(_bytes(values), _bytes(self._sent)):
            return None
        self._sent = values
        return values

    def fill(self, values: torch.Tensor) -> None:
        """Writes values into the buffers, of which none is late."""
        values, at = values.to(self.device), 0
        for place, elems in zip(self._places, self._elems):
            write(values[at : at + elems], place.tensor)
            at += elems

    def give_initial(self, worker: Worker) -> None:
        """Worker rank 0 sends the values with which all begin."""
        gives = worker.rank == 0
        pulls = self.key.pulls if gives else self.key.next_pull()
        self._begin(worker, INITIAL_ROUND, 0, gives, not gives, pulls, 1)

    def push(
        self,
        worker: Worker,
        step: int,
        averages: bool,
        giver: int,
        weights: Callable[[], Memory],
        takes: bool,
    ) -> None:
        """All take worker `giver`'s values, or the mean; this one only if it `takes` any. Aliases
        of `weights` are not written."""
        self.key.round += 1
        self._find_aliases(weights)
        gives = averages or worker.rank == giver
        lands = takes and (averages or worker.rank != giver)
        divisor = worker.num_workers if averages else 1
        self._begin(worker, self.key.round, step, gives, lands, self.key.pulls, divisor)

    def _begin(
        self,
        worker: Worker,
        round_: int,
        step: int,
        gives: bool,
        lands: bool,
        pulls: int,
        divisor: int,
    ) -> None:
        if divisor > 1 or not gives:
            self._sent = None
        source = self.gathered() if gives else None

        def begin(values: Optional[torch.Tensor]) -> None:
            if values is not None and divisor == 1 and round_ > INITIAL_ROUND:
                values = self.unless_sent(values)
            target_at = self.staging.data_ptr() if lands else None
            done = partial(_arrived if lands else _has_left, self, values)
            transfer: Union[Push, Pull]
            if round_ == INITIAL_ROUND and not gives:
                transfer = Pull(self.key, round_, step, pulls, target_at, done)
            else:
                source_at = None if values is None else values.data_ptr()
                transfer = Push(self.key, round_, step, source_at, target_at, done)
                transfer.after_pulls = pulls
                transfer.changes = Future() if values is None else None
            transfer.exact = True
            worker.begin(transfer)

        if lands:
            self._await(divisor)
        self.copies.to_host(source, begin)

    def copied(self) -> Unpushed:
        """A copy for a checkpoint, once the buffers are there."""
        value: Future[np.ndarray] = Future()
        with self._taking:
            if self._late:
                self._copies.append(value)
            else:
                value.set_result(_array(self.gathered()))
        shape = (self.key.size_elems,)
        return Unpushed(self.key.key, self.key.name or "", shape, name_of(self.dtype), value)

    def _await(self, divisor: int) -> None:
        """From now on, whoever reads a buffer waits."""
        self.begin()
        self._divisor = divisor
        self._late = [
            None if id(place.tensor) in self._aliases else place.tensor for place in self._places
        ]
        torch.autograd.graph.increment_version(
            [
                one
                for one, place in zip(self._late, self._places)
                if one is not None and not place.is_statistic
            ]
        )
        self.copies.arm()
        watch(self, self._each_late())

    def _each_late(self) -> Iterable[torch.Tensor]:
        return {id(one): one for one in self._late if one is not None}.values()

    def _find_aliases(self, weights: Callable[[], Memory]) -> None:
        now = [place.tensor for place in self._places]
        if all(one is other for one, other in zip(now, self._before)):
            return
        new = [one for one, other in zip(now, self._before) if one is not other]
        memory, self._before = weights(), now
        self._aliases = {id(one) for one in now if id(one) in self._aliases}
        self._aliases |= {id(one) for one in new if memory.of(one)}

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        """Waits for the value, if one is under way, and writes it into the buffers. Raises the
        job's failure."""
        if not self._late:
            return
        self.await_value()
        with self._taking:
            if not self._late:
                return
            self.write()
            self.copies.finish()
            unwatch(self, self._each_late())
            self._late = []
            for copy in self._copies:
                copy.set_result(_array(self.gathered()))
            self._copies = []

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        may_begin_forward()
        self.take()

    def _copy(self) -> None:
        values = self.staging / self._divisor if self._divisor > 1 else self.staging
        # Not into what the script has put in their place since.
        values, at = self.copies.to_device(values), 0
        for buffer, elems in zip(self._late, self._elems):
            if buffer is not None:
                write(values[at : at + elems], buffer)
            at += elems


def _arrived(pack: Pack, source: Optional[torch.Tensor], error: Optional[BaseException]) -> None:
    """Called in the worker's thread; `source` stays until then."""
    pack.arrived(error)


def _has_left(pack: Pack, source: Optional[torch.Tensor], error: Optional[BaseException]) -> None:
    """As `_arrived`. Nobody waits for it, and a later round may be under way."""


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name as keys have it."""
    return str(dtype).rpartition(".")[2]


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8)


def _array(value: torch.Tensor) -> np.ndarray:
    return _bytes(value.cpu()).numpy().view(name_of(value.dtype))


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """The elements of a value that a checkpoint has."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return torch.from_numpy(flat.view(np.uint8).copy()).view(getattr(torch, flat.dtype.name))
