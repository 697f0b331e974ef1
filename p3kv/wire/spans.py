"""Frames that are traced on their way out and in."""

from __future__ import annotations

from typing import Optional

from p3kv.common.tracing import RECEIVE, SEND, UNKNOWN, Span, Tracer, now_ns
from p3kv.wire.fields import TransferHeader
from p3kv.wire.framing import Frame, Pieces, size_of


def traced(tracer: Tracer, frame: Frame, peer: int) -> Frame:
    """The frame to queue in place of one with a payload, which traces it if anything is traced.
    `peer`: whom it is for."""
    has_payload = frame.makes_payload or frame.payload is not None
    return _Traced(tracer, frame, peer) if tracer.enabled and has_payload else frame


class _Traced(Frame):
    __slots__ = ("_begun_ns", "_frame", "_peer", "_since_ns", "_size_bytes", "_tracer")

    def __init__(self, tracer: Tracer, frame: Frame, peer: int) -> None:
        super().__init__(frame.priority, frame.header, frame.payload, frame.in_turn)
        self._tracer = tracer
        self._frame = frame
        self._peer = peer
        self._since_ns = now_ns()
        self._begun_ns = 0
        self._size_bytes = 0

    def begin(self) -> Optional[Pieces]:
        self._begun_ns = now_ns()
        pieces = self._frame.begin()
        self._size_bytes = 0 if pieces is None else size_of(pieces)
        return pieces

    def sent(self) -> None:
        assert isinstance(self.header, TransferHeader)
        self._tracer.span(
            span(SEND, self.header, self._since_ns, self._begun_ns, self._peer, self._size_bytes)
        )
        self._frame.sent()

    def arrived(self) -> None:
        self._frame.arrived()


def trace_arrival(tracer: Tracer, header: TransferHeader, start_ns: int) -> None:
    """Records that a frame has arrived whose header came at `start_ns`, unless that is 0."""
    if start_ns:
        tracer.span(span(RECEIVE, header, start_ns, start_ns, header.rank, header.payload_bytes))


def span(
    kind: str, header: TransferHeader, since_ns: int, start_ns: int, peer: int, size_bytes: int
) -> Span:
    """Span until now of work on a frame; not all kinds have a step and a slice."""
    step, slice = (getattr(header, name, UNKNOWN) for name in ("step", "slice"))
    return Span(
        kind, header.key, since_ns, start_ns, now_ns(), peer, header.round, step, slice,
        header.priority, size_bytes,
    )  # fmt: skip
