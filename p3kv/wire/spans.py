"""Frames that are traced on their way out and in."""

from __future__ import annotations

from p3kv.common.tracing import RECEIVE, SEND, UNKNOWN, Span, Tracer, now_ns
from p3kv.wire.fields import TransferHeader
from p3kv.wire.framing import Frame, Payload, Pieces, size_of


def trace_departure(tracer: Tracer, frame: Frame, peer: int) -> None:
    """Has a frame that is to be queued now be traced, if anything is. `peer`: whom it is for."""
    if tracer.enabled and frame.payload is not None:
        assert isinstance(frame.header, TransferHeader)
        departure = _Departure(tracer, frame, frame.header, frame.payload, peer)
        frame.payload, frame.on_sent = departure.begin, departure.end


class _Departure:
    __slots__ = ("_begun_ns", "_header", "_on_sent", "_payload", "_peer", "_since_ns",
                 "_size_bytes", "_tracer")  # fmt: skip

    def __init__(
        self, tracer: Tracer, frame: Frame, header: TransferHeader, payload: Payload, peer: int
    ) -> None:
        self._tracer = tracer
        self._payload = payload
        self._on_sent = frame.on_sent
        self._peer = peer
        self._header = header
        self._since_ns = now_ns()
        self._begun_ns = 0
        self._size_bytes = 0

    def begin(self) -> Pieces:
        """The payload; called when the frame begins to leave."""
        self._begun_ns = now_ns()
        payload = self._payload
        pieces = payload() if callable(payload) else payload
        self._size_bytes = size_of(pieces)
        return pieces

    def end(self) -> None:
        self._tracer.span(
            span(SEND, self._header, self._since_ns, self._begun_ns, self._peer, self._size_bytes)
        )
        if self._on_sent is not None:
            self._on_sent()


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
