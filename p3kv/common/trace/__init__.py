"""Records of what processes do and when, which they write when a trace is asked for."""

from p3kv.common.trace.reading import Trace, read_trace
from p3kv.common.trace.records import (
    APPLIED,
    FORWARD_BEGIN,
    FORWARD_END,
    INSTANTS,
    READY,
    RECEIVE,
    SEND,
    SUM,
    UNKNOWN,
    UPDATE,
    ClockSample,
    KeyName,
    Process,
    Span,
)
from p3kv.common.trace.tracer import SUFFIX, Tracer, now_ns

__all__ = [
    "APPLIED",
    "FORWARD_BEGIN",
    "FORWARD_END",
    "INSTANTS",
    "READY",
    "RECEIVE",
    "SEND",
    "SUFFIX",
    "SUM",
    "UNKNOWN",
    "UPDATE",
    "ClockSample",
    "KeyName",
    "Process",
    "Span",
    "Trace",
    "Tracer",
    "now_ns",
    "read_trace",
]
