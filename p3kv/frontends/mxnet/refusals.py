"""What pushes can't be, in the words of MXNet's users."""

from __future__ import annotations

from typing import Any, NoReturn, Optional

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import asynchronous, clipping, who_updates
from p3kv.frontends.mxnet.arrays import check_updatable
from p3kv.frontends.mxnet.worker_optimizer import WorkerOptimizer
from p3kv.store.pushes import Checks
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class PushChecks(Checks[WorkerOptimizer]):
    """Of one store."""

    def __init__(self, own: WorkerStore) -> None:
        self._own = own

    def first_push(self, key: WorkerKey, optimizer: Optional[WorkerOptimizer]) -> None:
        if self._own.is_saved and optimizer is None:
            raise NotSupportedError(
                f"{key.called} is pushed to a store without an optimizer: the workers update the "
                "weights, and checkpoints would not have them. Unset P3KV_CHECKPOINT_DIR and save "
                f"weights and states in the script, or {who_updates.SERVERS}"
            )
        if self._own.own_rounds:
            asynchronous.check_first_push(key.called, optimizer is not None)
        if not self._own.exchanges_all and optimizer is None:
            raise NotSupportedError(
                f"{key.called} is pushed to a store without an optimizer, and the consistency rule "
                "does not exchange every push: a sum would lack some. Call kv.set_optimizer on "
                "every worker first, or use another rule"
            )
        if optimizer is not None:
            check_updatable(key)

    def lacks_gradient(self, key: WorkerKey, optimizer: WorkerOptimizer) -> NoReturn:
        name = type(optimizer.optimizer).__name__
        raise NotSupportedError(
            f"this worker has no fresh gradient of {key.called}, and the update of another key by "
            f"{name} depends on whether this one is updated, which other workers know. Use another "
            "optimizer (Adam, SGD), or run it on the workers (update_on_kvstore=False)"
        )

    def clips_without_optimizer(self) -> NoReturn:
        clipping.refuse_without_optimizer()

    def part_of_a_step(self, keys: Any) -> NoReturn:
        clipping.refuse_part_of_a_step(keys)
