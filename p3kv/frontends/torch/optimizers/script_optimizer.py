"""The optimizer of torch's that a script has set, and what the servers must be told of it."""

from __future__ import annotations

from typing import Dict, Mapping, Optional, Sequence

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
        self._settings = self._plain()

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
        return self.settings if self._settings != before else None

    def has_changed(self) -> bool:
        return bool(structs.asdict(self._plain()) != structs.asdict(self._settings))

    def _plain(self) -> PlainTorchOptimizer:
        check_rows(self.optimizer, self.sparse)
        settings = plain(self.optimizer, self.keys, self.since_step, self.workers)
        return structs.replace(settings, name=self.name)


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
        self, key: WorkerKey, states: Sequence[State], optimizer: TorchScriptOptimizer
    ) -> None:
        state = None
        if states:
            joined = State.joined(states)
            state = State(joined.elements, {**joined.numbers, "since_step": optimizer.since_step})
        give_state(self._own, key, state, optimizer.needs_whole_tensors)
