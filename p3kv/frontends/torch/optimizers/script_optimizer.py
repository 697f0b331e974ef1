"""The optimizer of torch's that a script has set, and what the servers must be told of it."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from msgspec import structs

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.optimizers.optimizer_settings import (
    PlainTorchOptimizer,
    class_of,
    momentum_of,
    needs_whole,
    plain,
)
from p3kv.frontends.torch.optimizers.predictions import predicts
from p3kv.frontends.torch.optimizers.sgd_after_momentum import SGDAfterMomentum
from p3kv.frontends.torch.rows import check_rows
from p3kv.server.optimizer import State
from p3kv.store.resuming import Counts, GoesOn
from p3kv.store.script_optimizer import ScriptOptimizer
from p3kv.store.states import give_state
from p3kv.wire.messages import Key, encode
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class TorchScriptOptimizer(ScriptOptimizer):
    """Keeps the servers' optimizer like the script's, once a step."""

    counts_updates = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        keys: Dict[int, Key],
        since_step: int,
        workers: int,
        momentum_by_codec: bool = False,
        sparse: Optional[Mapping[int, str]] = None,
    ) -> None:
        """`keys` has the key of each parameter by its id. `momentum_by_codec`: the codec of
        gradients applies the momentum of SGD, and the servers do not. `sparse`: by id, the names of
        parameters that travel by rows. Raises NotSupportedError for an optimizer that servers can't
        run."""
        self.sparse = sparse or {}
        self.momentum_by_codec = momentum_by_codec
        self.momentum = momentum_of(optimizer) if momentum_by_codec else None
        self.name = class_of(optimizer).__name__
        if self.momentum is not None:
            self.name = SGDAfterMomentum.__name__
        self.needs_whole_tensors = needs_whole(optimizer)
        self.predicts = predicts(optimizer) and not momentum_by_codec
        self.optimizer = optimizer
        self.keys = keys
        self.since_step = since_step
        self.workers = workers
        self._read: Optional[List[Any]] = None
        """What the settings were made of that were made last."""
        self._made = self._settings = self._plain()

    @property
    def settings(self) -> bytes:
        return encode(self._settings)

    def begin_step(self, step: int, updates: int) -> Optional[bytes]:
        before = self._settings
        self._settings = self._plain()
        if self.momentum_by_codec and momentum_of(self.optimizer) != self.momentum:
            raise NotSupportedError(
                f"the optimizer's momentum was {self.momentum} and has changed, and the codec of "
                "gradients has gathered gradients by the first; keep it, or use another codec "
                "(topk)"
            )
        is_new = self._settings is not before and self._settings != before
        return self.settings if is_new else None

    def has_changed(self) -> bool:
        now, known = self._plain(), self._settings
        return now is not known and bool(structs.asdict(now) != structs.asdict(known))

    def _plain(self) -> PlainTorchOptimizer:
        """The settings as they are now: the same object while nothing has changed."""
        read = _read(self.optimizer)
        if read is None or read != self._read:
            check_rows(self.optimizer, self.sparse)
            settings = plain(self.optimizer, self.keys, self.since_step, self.workers)
            self._made, self._read = structs.replace(settings, name=self.name), read
        return self._made


def _read(optimizer: torch.optim.Optimizer) -> Optional[List[Any]]:
    """A copy of all that settings are made of; None where it can't be compared, as with tensors."""
    found: List[Any] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            found.append(name)
            if name == "params":
                found.append([*map(id, value)])
                continue
            values = value if isinstance(value, (list, tuple)) else (value,)
            if any(type(one) not in _PLAIN for one in values):
                return None
            found.append(value)
    return found


_PLAIN = (bool, float, int, str, type(None))


class TorchGoesOn(GoesOn[TorchScriptOptimizer]):
    """Optimizers of one store that go on from a checkpoint: the states have their counts."""

    def __init__(self, own: WorkerStore) -> None:
        self._own = own

    def optimizer(
        self, fresh: TorchScriptOptimizer, counts: Counts, since_step: int
    ) -> TorchScriptOptimizer:
        return TorchScriptOptimizer(
            fresh.optimizer, fresh.keys, since_step, fresh.workers, fresh.momentum_by_codec,
            fresh.sparse,
        )  # fmt: skip

    def give(
        self,
        key: WorkerKey,
        states: Sequence[State],
        optimizer: TorchScriptOptimizer,
        member: int = 0,
    ) -> None:
        state = None
        if states:
            joined = State.joined(states)
            state = State(joined.elements, {**joined.numbers, "since_step": optimizer.since_step})
        give_state(self._own, key, state, optimizer.needs_whole_tensors, member)
