"""Where the script is: when it begins a forward pass of training, and when it waits for values.

The first read of a late tensor with gradients is that of a forward pass. Reports tell by it which
part of the time between two steps is the script's own, such as reading data.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, TypeVar

import torch

from p3kv.worker import this_process

T = TypeVar("T")


def may_begin_forward() -> None:
    """A late tensor is read: by a forward pass of training, if gradients are computed."""
    if torch.is_grad_enabled():
        this_process.worker().forward_begins()


@functools.lru_cache(maxsize=None)
def trace_forwards() -> None:
    """Has traces say when a backward pass begins, and so when the forward pass has ended. Once, and
    only where there are traces."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def note_and_call(*arguments: Any, **more: Any) -> Any:
        this_process.worker().forward_ends()
        return backward(*arguments, **more)

    torch.autograd.backward = note_and_call


def waited(wait: Callable[[], T]) -> T:
    """Calls `wait`, in which the script waits for a value."""
    worker = this_process.worker()
    worker.waits()
    since_s = time.monotonic()
    try:
        return wait()
    finally:
        worker.waited(since_s)
