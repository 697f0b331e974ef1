"""Traces of a worker's transfers."""

from __future__ import annotations

from p3kv.common.tracing import APPLIED, READY, UNKNOWN, Span, Tracer, now_ns
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.transfers import Transfer


def trace_ready(tracer: Tracer, transfer: Transfer) -> None:
    """Records that a transfer begins, because its gradient is ready."""
    pushes = transfer.source is not None and transfer.round > INITIAL_ROUND
    if pushes and transfer.is_exchanged:
        _trace(tracer, READY, transfer)


def trace_applied(tracer: Tracer, transfer: Transfer) -> None:
    """Records that a transfer is done: its value is where the forward pass reads it."""
    _trace(tracer, APPLIED, transfer)


def trace_script(tracer: Tracer, kind: str) -> None:
    """Records what the script does now."""
    at_ns = now_ns()
    tracer.span(Span(kind, UNKNOWN, at_ns, at_ns, at_ns))


def _trace(tracer: Tracer, kind: str, transfer: Transfer) -> None:
    at_ns = now_ns()
    tracer.span(
        Span(
            kind, transfer.key.key_id, at_ns, at_ns, at_ns, UNKNOWN, transfer.round, transfer.step,
            UNKNOWN, transfer.priority, transfer.size_bytes,
        )
    )  # fmt: skip
