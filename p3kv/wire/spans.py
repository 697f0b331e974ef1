"""Frames that are traced on their way out and in."""

from __future__ import annotations

from functools import partial
from typing import Callable, Optional, Tuple

from p3kv.common.trace import RECEIVE, SEND, UNKNOWN, Span, Tracer, now_ns
from p3kv.wire.framing import Payload
from p3kv.wire.header import Header, Kind

_NUMBERED = (Kind.PULLED, Kind.ROWS)
"""Kinds of frames in which the step's field has a request's number."""


OnSent = Optional[Callable[[], None]]


def traced_departure(
    tracer: Tracer, payload: Payload, on_sent: OnSent, *of_frame: int
) -> Tuple[Payload, OnSent]:
    """The payload with which a frame is to be queued now, and what is to be called when it has
    left: `payload` and `on_sent`, and the frame is traced if anything is.

    `of_frame`: the id of its key, peer, round, step, slice and priority.
    """
    if not tracer.enabled:
        return payload, on_sent
    departure = _Departure(tracer, payload, on_sent, of_frame)
    return departure.begin, departure.end


class _Departure:
    __slots__ = ("_begun_ns", "_of_frame", "_on_sent", "_payload", "_since_ns", "_size_bytes",
                 "_tracer")  # fmt: skip

    def __init__(
        self, tracer: Tracer, payload: Payload, on_sent: OnSent, of_frame: Tuple[int, ...]
    ) -> None:
        self._tracer = tracer
        self._payload = payload
        self._on_sent = on_sent
        self._of_frame = of_frame
        self._since_ns = now_ns()
        self._begun_ns = 0
        self._size_bytes = 0

    def begin(self) -> memoryview:
        """The payload; called when the frame begins to leave."""
        self._begun_ns = now_ns()
        payload = self._payload
        memory = payload() if callable(payload) else payload
        self._size_bytes = len(memory)
        return memory

    def end(self) -> None:
        key_id, peer, round_, step, slice_, priority = self._of_frame
        self._tracer.span(
            Span(
                SEND, key_id, self._since_ns, self._begun_ns, now_ns(), peer, round_, step, slice_,
                priority, self._size_bytes,
            )
        )  # fmt: skip
        if self._on_sent is not None:
            self._on_sent()


def traced_arrival(
    tracer: Tracer, header: Header, arrived: Callable[[], None]
) -> Callable[[], None]:
    """What to call when a frame has arrived whose header has arrived now: `arrived`, and the frame
    is traced if anything is."""
    return partial(_arrive, tracer, header, arrived, now_ns()) if tracer.enabled else arrived


def _arrive(tracer: Tracer, header: Header, arrived: Callable[[], None], start_ns: int) -> None:
    tracer.span(
        Span(
            RECEIVE, header.key, start_ns, start_ns, now_ns(), header.rank, header.round,
            UNKNOWN if header.kind in _NUMBERED else header.step, header.slice, header.priority,
            header.payload_bytes,
        )
    )  # fmt: skip
    arrived()
