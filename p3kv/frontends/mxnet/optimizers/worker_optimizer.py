"""The optimizer of MXNet's that a script has set, and what the servers must be told of it."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import mxnet as mx
from msgspec import structs

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet.optimizers.optimizer_settings import (
    KEPT_BY_KEY,
    SHARED_NUMBERS,
    PlainOptimizer,
    SharedNumber,
    is_mxnets,
    is_random,
    needs_whole_tensors,
    plain,
)
from p3kv.frontends.mxnet.optimizers.predictions import predicts
from p3kv.frontends.mxnet.optimizers.sgd_after_momentum import SGDAfterMomentum, momentum_of
from p3kv.store.script_optimizer import ScriptOptimizer
from p3kv.wire.messages import Key, encode

SEED = "p3kv_seed"
"""In files, beside MXNet's own attributes of the optimizer: what its random numbers follow from."""


class WorkerOptimizer(ScriptOptimizer):
    """Keeps the servers' optimizer like the script's: once a step, where need be once a push."""

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        since_step: int,
        resumed: Optional[Mapping[str, Any]] = None,
        momentum_by_codec: bool = False,
        noted: Optional[Mapping[Key, int]] = None,
    ) -> None:
        """`resumed`: what `remembered` was in the training that goes on. `momentum_by_codec`: the
        codec of gradients applies the momentum of SGD, and the servers do not. `noted`: how many of
        the updates that `optimizer` has counted of each key are the store's.

        Raises NotSupportedError for an optimizer that no server can build.
        """
        kind = type(optimizer)
        self.name = kind.__name__
        self.since_step = since_step
        self.needs_whole_tensors = needs_whole_tensors(kind)
        self.shares_numbers = is_mxnets(kind) and self.name in SHARED_NUMBERS
        self.kept_by_key = KEPT_BY_KEY.get(self.name) if is_mxnets(kind) else None
        """Its attribute with what it keeps for keys in itself."""
        self.optimizer = optimizer
        """The script's."""
        self._noted: Dict[Key, int] = dict(noted or {})
        """How many updates of each key are the store's; the others were before, or are those of
        another store with the same optimizer."""
        self._of_name: Dict[Key, List[Key]] = {}
        """What else MXNet calls a key: a Module's places of parameters, whose keys are names."""
        for index, key in optimizer.idx2name.items():
            if key not in optimizer.param_dict:
                self._of_name.setdefault(key, []).append(index)
        self._num_update_before = optimizer.num_update
        self._seen: Dict[Key, int] = {}
        """MXNet's counts of updates, as they were when this store counted last."""
        self._before: Dict[Key, int] = {}
        self._first_update: int = optimizer.begin_num_update
        """The greatest count before the store's, of the keys that it trains."""
        resumed = resumed or {}
        # All workers draw: those whose random numbers are alike stay so.
        self._seed = None if not is_random(kind) else resumed[SEED] if SEED in resumed else _drawn()
        self.momentum = momentum_of(optimizer)
        self._momentum_by_codec = momentum_by_codec and self.momentum is not None
        self.predicts = predicts(optimizer) and not self._momentum_by_codec
        if self._momentum_by_codec:
            self.name = SGDAfterMomentum.__name__
        self._settings = self._plain()
        known = {**vars(optimizer), **resumed} if is_mxnets(kind) else {}
        self._schedule: float = known.get("m_schedule", 1.0)
        self._last_rate: Optional[float] = known.get("cur_lr")
        """Rate of LARS's last update."""
        self._value_for_first: Optional[float] = None

    @property
    def settings(self) -> bytes:
        return encode(self._settings)

    def begin_step(self, step: int, updates: int) -> Optional[bytes]:
        """Learning rate schedulers run here and use this count, which MXNet only counts where it
        updates."""
        optimizer, before = self.optimizer, self._settings
        optimizer.num_update = self.num_update(updates)
        self._settings = self._plain(step - self.since_step - updates)
        if self._momentum_by_codec and optimizer.momentum != self.momentum:
            raise NotSupportedError(
                f"the optimizer's momentum was {self.momentum} and is {optimizer.momentum} now, "
                "and the codec of gradients has gathered gradients by the first; keep it, or use "
                "another codec (topk)"
            )
        if self.shares_numbers:
            self._change_rate(before.rate)
        return self.settings if self._settings != before else None

    def has_changed(self) -> bool:
        now = self._plain()
        return now != structs.replace(self._settings, counts_from=now.counts_from)

    def num_update(self, updates: int) -> int:
        """MXNet's count of steps after so many of the store's."""
        counts = self.optimizer._index_update_count.values()
        return max([self._num_update_before, self._first_update + updates, *counts])

    def note_updates(self, key: Key, updates: int) -> None:
        """Counts as MXNet does where it updates: whoever goes on with the optimizer goes on from
        this."""
        self._see_counts()
        count = self.count_before(key) + updates
        self._noted[key] = updates
        for index in self._indices(key):
            self.optimizer._index_update_count[index] = self._seen[index] = count

    def count_before(self, key: Key) -> int:
        """MXNet's count of a key's updates, without the store's."""
        first: int = self.optimizer.begin_num_update
        return self._before.get(key, first)

    def _see_counts(self) -> None:
        """Finds the counts of before, where others than the store have counted since."""
        optimizer, counts = self.optimizer, self.optimizer._index_update_count
        if counts == self._seen:
            return
        self._seen = dict(counts)
        for key in {*self._noted, *self._of_name, *optimizer.param_dict, *counts}:
            found = [counts[index] for index in self._indices(key) if index in counts]
            if found:
                self._before[key] = max(found) - self._noted.get(key, 0)
        trained = self._noted or [
            *self._of_name,
            *(key for key, one in optimizer.param_dict.items() if one.grad_req != "null"),
        ]
        self._first_update = max(map(self.count_before, trained), default=0)

    def _indices(self, key: Key) -> List[Key]:
        return [key, *self._of_name.get(key, ())]

    def _plain(self, other_steps: int = 0) -> PlainOptimizer:
        self._see_counts()
        settings = plain(self.optimizer, self.since_step, self._seed, other_steps)
        usual = self.optimizer.begin_num_update
        counts = [(key, count) for key, count in self._before.items() if count != usual]
        return structs.replace(
            settings, name=self.name, counts=counts, first_update=self._first_update
        )

    def shared_number(self, key: Key, update: int) -> Optional[bytes]:
        """MXNet's Nadam, LARS and LBSGD leave a number from one key's update for that of the next.
        Servers do not know which key is next, so it is computed here, in the order of the pushes.
        """
        if self.name == "Nadam":
            value: Optional[float] = self._schedule
            self._advance_schedule(key, update)
        else:
            value, self._value_for_first = self._value_for_first, None
        if value is None:
            return None
        return encode(SharedNumber(key, update, self.since_step, SHARED_NUMBERS[self.name], value))

    def _advance_schedule(self, key: Key, update: int) -> None:
        """Does as Nadam's update: with every update of any key, by the count of that key."""
        nadam = self.optimizer
        t = self.count_before(key) + update
        momentum_t = nadam.beta1 * (1.0 - 0.5 * (pow(0.96, t * nadam.schedule_decay)))
        self._schedule = nadam.m_schedule = self._schedule * momentum_t

    def _change_rate(self, before: float) -> None:
        """LARS corrects the momentum of the first update with a new rate, by the rate before.
        LBSGD asks its scheduler before it counts, so a step's first update has the rate before."""
        rate = self._settings.rate
        if isinstance(self.optimizer, mx.optimizer.LARS):
            last, self._last_rate = self._last_rate, rate
            self.optimizer.cur_lr = self.optimizer.last_lr = rate
        else:
            last = before if self.optimizer.lr_scheduler is not None else None
        self._value_for_first = None if last == rate else last

    def remembered(self) -> Dict[str, Any]:
        """Values that updates have changed in the optimizer itself, by the names of its attributes.
        In one process MXNet's own optimizer has these values now."""
        found: Dict[str, Any] = {}
        if self._seed is not None:
            found[SEED] = self._seed
        if self.shares_numbers and isinstance(self.optimizer, mx.optimizer.Nadam):
            found["m_schedule"] = self._schedule
        if self.shares_numbers and isinstance(self.optimizer, mx.optimizer.LARS):
            found["cur_lr"] = found["last_lr"] = self._last_rate
        return found


def take_remembered(optimizer: mx.optimizer.Optimizer) -> Dict[str, Any]:
    """Reads what a file's optimizer has of `WorkerOptimizer.remembered`, and removes from it what
    MXNet does not know."""
    values = vars(optimizer)
    found = {SEED: values.pop(SEED)} if SEED in values else {}
    if is_mxnets(type(optimizer)):
        found.update({name: values[name] for name in ("m_schedule", "cur_lr") if name in values})
    return found


def _drawn() -> int:
    """A seed that follows from the script's own, `mx.random.seed`."""
    return int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,)).asscalar())
