"""Refusals of pushes and optimizers: the table of combinations is asked in MXNet's words."""

from __future__ import annotations

from typing import Any, NoReturn, Optional

from p3kv.common.combinations import Feature
from p3kv.frontends.mxnet import clipping
from p3kv.frontends.mxnet.worker_optimizer import WorkerOptimizer
from p3kv.store.pushes import Checks
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class PushChecks(Checks[WorkerOptimizer]):
    """Checks of one store."""

    def __init__(self, own: WorkerStore) -> None:
        self._own = own

    def new_optimizer(self, new: WorkerOptimizer, before: Optional[WorkerOptimizer]) -> None:
        """Raises NotSupportedError for an optimizer that can't run, or not after the one before."""
        features = {Feature.OPTIMIZER, Feature.NO_PREDICTION}
        after = []
        if new.shares_numbers:
            features.add(Feature.SHARES_NUMBERS)
        if before is not None and new.needs_whole_tensors != before.needs_whole_tensors:
            features.add(Feature.OTHER_CUT)
            after.append(type(before.optimizer).__name__)
        spread_out = self._own.keys_on_several_servers()
        if new.needs_whole_tensors:
            features.add(Feature.WHOLE_TENSORS)
            if spread_out:
                features.add(Feature.SPREAD_OUT)
                first, *_ = spread_out
                servers = len(first.runs)
                after.append(f"{first.called} was initialised, which lies on {servers} servers")
        said = f", set after {' and after '.join(after)}" if after else ""
        self._own.combine(features, f"the optimizer {type(new.optimizer).__name__}{said}")

    def first_push(self, key: WorkerKey, optimizer: Optional[WorkerOptimizer]) -> None:
        if optimizer is None:
            what = f"{key.called} is pushed to a store without an optimizer"
            self._own.combine({Feature.NO_OPTIMIZER}, what)
        elif not key.dtype.startswith("float"):
            what = f"{key.called} of {key.dtype} is pushed to a store with an optimizer"
            self._own.combine({Feature.INTEGERS, Feature.OPTIMIZER}, what)

    def lacks_gradient(self, key: WorkerKey, optimizer: WorkerOptimizer) -> None:
        name = type(optimizer.optimizer).__name__
        what = f"this worker has no fresh gradient of {key.called}, which {name} updates"
        self._own.combine({Feature.SHARES_NUMBERS, Feature.NO_GRADIENT}, what)

    def clips_without_optimizer(self) -> None:
        clipping.check_optimizer(has_optimizer=False)

    def part_of_a_step(self, keys: Any) -> NoReturn:
        clipping.refuse_part_of_a_step(keys)
