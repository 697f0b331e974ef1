"""When forward passes end: an operation of the engine that reads the loss says so.

One operation for each backward pass. Where single layers begin is not known: a hook for each block
would cost more than all the rest of a trace.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

from mxnet import autograd
from mxnet.executor import Executor
from mxnet.ndarray import NDArray

from p3kv.common.tracing import FORWARD_END, UNKNOWN, Span, Tracer, now_ns
from p3kv.frontends.mxnet import engine

_NAME = b"p3kv_forward_end"
"""Name of the operation in MXNet's profiler."""


def trace(tracer: Tracer) -> None:
    """Has every backward pass record when what it begins with is computed, if `tracer` records
    anything. To be called once."""
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
