"""Traces of frames on their way, and how far the scheduler's clock is ahead of this process's."""

from __future__ import annotations

from typing import Optional

from p3kv.common.tracing import RECEIVE, SEND, UNKNOWN, ClockSample, Span, Tracer, now_ns
from p3kv.wire.control import ControlClient
from p3kv.wire.fields import TransferHeader
from p3kv.wire.framing import Frame, Pieces, size_of
from p3kv.wire.loop import Loop
from p3kv.wire.messages import AskTime, TimeTold


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


ASK_EVERY_S = 2.0
_TIMES = 8
"""Questions in a row; the best answer counts. The first leaves this process late, because a thread
has to wake for it; the others follow an answer at once."""


class SchedulersClock:
    """Asks the scheduler for the time every `ASK_EVERY_S` seconds while a trace is written.

    As in NTP (RFC 5905, section 8), a question and its answer carry the times at which both
    processes have sent and received them. The shortest round trip tells most, since how it is
    divided between the two ways is not known.
    """

    def __init__(self) -> None:
        self._tracer: Optional[Tracer] = None
        self._left = 0
        self._best: Optional[ClockSample] = None

    def watch(self, tracer: Tracer, loop: Loop, control: ControlClient) -> None:
        """Begins to ask, if `tracer` records anything; the answers go there. In the loop's
        thread."""
        if not tracer.enabled:
            return
        self._tracer = tracer
        if not self._left:  # else the scheduler is silent, and answers later
            self._left, self._best = _TIMES, None
            control.send(AskTime(now_ns()))
        loop.call_later(ASK_EVERY_S, self.watch, tracer, loop, control)

    def take(self, answer: TimeTold) -> Optional[AskTime]:
        """Takes an answer, in the thread of the connection to the scheduler; returns the next
        question, if there is one."""
        sample = sample_of(answer, now_ns())
        if self._best is None or sample.round_trip_ns < self._best.round_trip_ns:
            self._best = sample
        self._left -= 1
        if self._left > 0:
            return AskTime(now_ns())
        if self._tracer is not None:
            self._tracer.clock(self._best)
        return None


def sample_of(answer: TimeTold, now: int) -> ClockSample:
    """Clock sample of an answer that arrived at `now`, in nanoseconds of this process's clock."""
    there_ns = answer.received_ns - answer.asked_ns
    back_ns = answer.sent_ns - now
    round_trip_ns = (now - answer.asked_ns) - (answer.sent_ns - answer.received_ns)
    return ClockSample((answer.asked_ns + now) // 2, (there_ns + back_ns) // 2, round_trip_ns)
