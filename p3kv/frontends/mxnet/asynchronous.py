"""What an asynchronous store can't do: where servers update with every push at once."""

from __future__ import annotations

from typing import Optional

from p3kv.errors import NotSupportedError, StatesError
from p3kv.frontends.mxnet.worker_optimizer import WorkerOptimizer

TYPE = "dist_async_p3"
"""The store's name. MXNet looks for 'dist' and 'async' in it."""
SYNC_TYPE = "dist_sync_p3"


def check_optimizer(new: WorkerOptimizer, before: Optional[WorkerOptimizer]) -> None:
    """Raises NotSupportedError for an optimizer that can't run, or not after the one before."""
    name = type(new.optimizer).__name__
    if new.shares_numbers:
        raise NotSupportedError(
            f"{name} needs a number that one key's update leaves for the next key's, and an "
            "asynchronous store's servers update keys in no common order. Use another optimizer "
            "(Adam, SGD), or kvstore='p3'"
        )
    if before is not None and new.needs_whole_tensors != before.needs_whole_tensors:
        whole, by_slice = name, type(before.optimizer).__name__
        if before.needs_whole_tensors:
            whole, by_slice = by_slice, whole
        raise NotSupportedError(
            f"{whole} updates whole tensors and {by_slice} slices; the servers of an asynchronous "
            "store can't change from one to the other, since other workers' pushes are under way. "
            f"Use a new store: mx.kv.create('{TYPE}')"
        )


def check_first_push(called: str, has_optimizer: bool) -> None:
    """Raises NotSupportedError for a push without an optimizer: nothing could be done with it."""
    if not has_optimizer:
        raise NotSupportedError(
            f"{called} is pushed to an asynchronous store without an optimizer, whose servers "
            "would have nothing to update it with. Call kv.set_optimizer on every worker first, "
            "or use kvstore='p3', which sums"
        )


def no_states(what: str) -> StatesError:
    """The error of a script that has states saved or loaded."""
    return StatesError(
        f"the servers' states of an asynchronous store can't be {what}: they change at any time. "
        "Use kvstore='p3'"
    )
