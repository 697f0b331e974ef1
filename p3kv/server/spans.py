"""Traces of a server's work on slices."""

from __future__ import annotations

from p3kv.common.tracing import SUM, UNKNOWN, UPDATE, Span, Tracer, now_ns
from p3kv.server.engine import Ended, ServerSlice
from p3kv.wire.fields import QueuedHeader
from p3kv.wire.spans import span


def trace_sum(tracer: Tracer, header: QueuedHeader, start_ns: int) -> None:
    """Records that a worker's frame has been added to its round since `start_ns`."""
    if tracer.enabled:
        tracer.span(span(SUM, header, start_ns, start_ns, header.rank, header.payload_bytes))


def trace_update(tracer: Tracer, ended: Ended, start_ns: int) -> None:
    """Records that a slice's round has been ended since `start_ns`."""
    slice_ = ended.unit
    if tracer.enabled and isinstance(slice_, ServerSlice):
        size_bytes = slice_.length * slice_.plan.dtype.itemsize
        tracer.span(
            Span(
                UPDATE, slice_.plan.key_id, start_ns, start_ns, now_ns(), UNKNOWN,
                ended.round, ended.step, slice_.index, ended.priority, size_bytes,
            )
        )  # fmt: skip
