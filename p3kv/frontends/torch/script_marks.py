"""Where the script is: when it begins a forward pass of training, and when it waits for values.

The first read of a late tensor with gradients is that of a forward pass. Reports tell by it which
part of the time between two steps is the script's own, such as reading data.
"""

from __future__ import annotations

import time
from typing import Callable, TypeVar

import torch

from p3kv.worker import this_process

T = TypeVar("T")


def may_begin_forward() -> None:
    """A late tensor is read: by a forward pass of training, if gradients are computed."""
    if torch.is_grad_enabled():
        this_process.worker().forward_begins()


def waited(wait: Callable[[], T]) -> T:
    """Calls `wait`, in which the script waits for a value."""
    worker = this_process.worker()
    worker.waits()
    since_s = time.monotonic()
    try:
        return wait()
    finally:
        worker.waited(since_s)
