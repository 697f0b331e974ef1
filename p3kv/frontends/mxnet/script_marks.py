"""Where the script is: when it begins a forward pass of training, and when it waits for arrays.

Two things cost a script little that say this. A training step enters `autograd.record`, or Module
runs its executor, once. And what waits for arrays passes a few functions of MXNet's. What a script
reads in between, such as its data, shows nowhere else.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Dict

import mxnet as mx
from mxnet import autograd
from mxnet.executor import Executor
from mxnet.ndarray import NDArray

from p3kv.common.tracing import FORWARD_END, UNKNOWN, Span, Tracer, now_ns
from p3kv.frontends.mxnet import engine

Mark = Callable[[], None]
Waited = Callable[[float], None]


def note(forward_begins: Mark, waits: Mark, waits_for_all: Mark, waited: Waited) -> None:
    """Has these called from now on, in the script's thread or others: `forward_begins()`, and for
    each wait `waits()`, or `waits_for_all()`, before it and `waited(since_s)` after it. To be
    called once."""
    autograd.set_recording = _noting_record(autograd.set_recording, forward_begins)
    Executor.forward = _noting_training(Executor.forward, forward_begins)
    for owner, name, begins in (
        (mx.nd, "waitall", waits_for_all), (mx.nd.ndarray, "waitall", waits_for_all),
        (NDArray, "asnumpy", waits), (NDArray, "wait_to_read", waits),
    ):  # fmt: skip
        setattr(owner, name, _noting_wait(getattr(owner, name), begins, waited))


def _noting_record(unpatched: Callable[..., bool], forward_begins: Mark) -> Callable[..., bool]:
    @functools.wraps(unpatched)
    def set_recording(is_recording: bool) -> bool:
        if is_recording:
            forward_begins()
        return unpatched(is_recording)

    return set_recording


def _noting_training(unpatched: Callable[..., Any], forward_begins: Mark) -> Callable[..., Any]:
    @functools.wraps(unpatched)
    def forward(executor: Executor, is_train: bool = False, **more: Any) -> Any:
        if is_train:
            forward_begins()
        return unpatched(executor, is_train, **more)

    return forward


def _noting_wait(unpatched: Callable[..., Any], waits: Mark, waited: Waited) -> Callable[..., Any]:
    @functools.wraps(unpatched)
    def wait(*arguments: Any, **more: Any) -> Any:
        waits()
        since_s = time.monotonic()
        try:
            return unpatched(*arguments, **more)
        finally:
            waited(since_s)

    return wait


_NAME = b"p3kv_forward_end"
"""Name of the operation in MXNet's profiler."""


def trace(tracer: Tracer) -> None:
    """Has every backward pass record when what it begins with is computed, if `tracer` records
    anything: an operation of the engine that reads the loss says so. To be called once.

    Where single layers begin is not known: a hook for each block would cost more than all the rest
    of a trace.
    """
    if not tracer.enabled:
        return

    def computed(operation: engine.Operation) -> None:
        at_ns = now_ns()
        tracer.span(Span(FORWARD_END, UNKNOWN, at_ns, at_ns, at_ns))
        operation.complete()

    for owner, heads_of in _OWNERS.items():
        owner.backward = _noting(owner.backward, heads_of, computed)


def _noting(
    unpatched: Callable[..., Any],
    heads_of: Callable[[Any], Any],
    computed: Callable[[engine.Operation], None],
) -> Callable[..., Any]:
    @functools.wraps(unpatched)
    def backward(first: Any, *arguments: Any, **more: Any) -> Any:
        heads = [head for head in heads_of(first) if isinstance(head, NDArray)]
        engine.push(computed, heads, [], _NAME)
        return unpatched(first, *arguments, **more)

    return backward


_OWNERS: Dict[Any, Callable[[Any], Any]] = {
    NDArray: lambda head: [head],
    autograd: lambda heads: heads if isinstance(heads, (list, tuple)) else [heads],
    Executor: lambda executor: executor.outputs,
}
"""Whose `backward` scripts and Module call; what the pass begins with, by the first argument."""
