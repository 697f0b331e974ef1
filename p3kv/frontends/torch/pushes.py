"""The pushes of a store of this front end."""

from __future__ import annotations

from typing import Any, Dict, List, NoReturn

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.store.forward_order import ForwardReads, OrderLearner
from p3kv.store.pushes import Pushes
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore


def pushes_of(own: WorkerStore, rank: int) -> Pushes[TorchScriptOptimizer]:
    """A store's, on the worker of this rank."""
    order = OrderLearner(own.publish_order, _NothingRead())
    order.stop()  # the first backward pass tells it
    return Pushes(own, order, rank, "torch", _refuse_part)


class _NothingRead(ForwardReads):
    def stop(self) -> None:
        pass

    def order(self, keys_by_array: Dict[int, Key]) -> List[Key]:
        return []


def _refuse_part(keys: Any) -> NoReturn:
    raise NotSupportedError("p3kv.torch clips no steps")
