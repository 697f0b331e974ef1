"""What is traced of a server's work on slices."""

from __future__ import annotations

from p3kv.server.slice_states import Result
from p3kv.trace import SUM, UNKNOWN, UPDATE, Span, Tracer, now_ns
from p3kv.wire.header import Header


def trace_sum(tracer: Tracer, header: Header, start_ns: int) -> None:
    """Records that a worker's frame has been added to its round since `start_ns`."""
    if tracer.enabled:
        tracer.span(
            Span(
                SUM, header.key, start_ns, start_ns, now_ns(), header.rank, header.round,
                header.step, header.slice, header.priority, header.payload_bytes,
            )
        )  # fmt: skip


def trace_update(tracer: Tracer, result: Result, start_ns: int) -> None:
    """Records that a slice's round has been ended since `start_ns`."""
    if tracer.enabled:
        state = result.state
        tracer.span(
            Span(
                UPDATE, state.key.key_id, start_ns, start_ns, now_ns(), UNKNOWN, result.round,
                result.step, state.index, result.priority, state.length * state.dtype.itemsize,
            )
        )  # fmt: skip
