"""How far the scheduler's clock is ahead of this process's: for traces of several hosts.

As in NTP (RFC 5905, section 8): a question and its answer carry the times at which both processes
have sent and received them. What is not known is how the round trip is divided between the two
ways, so the shortest one tells most.
"""

from __future__ import annotations

from typing import Callable, Optional

from p3kv.common.tracing import ClockSample, Tracer, now_ns
from p3kv.wire.messages import AskTime, TimeTold

ASK_EVERY_S = 2.0
_TIMES = 8
"""Questions that follow each other, of which the best answer counts. The first leaves this process
late, because a thread has to wake for it; the others follow an answer at once."""


class SchedulersClock:
    """Asks the scheduler for the time every `ASK_EVERY_S` seconds while a trace is written."""

    def __init__(self, send: Callable[[AskTime], None]) -> None:
        """`send` sends a message to the scheduler; from any thread."""
        self._send = send
        self._tracer: Optional[Tracer] = None
        self._left = 0
        self._best: Optional[ClockSample] = None

    def watch(
        self, tracer: Tracer, call_later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        """Begins to ask, if `tracer` records anything; the answers go there. `call_later` is that
        of the calling thread's loop."""
        if not tracer.enabled:
            return
        self._tracer = tracer
        if not self._left:  # else the scheduler is silent, and answers later
            self._left, self._best = _TIMES, None
            self._ask()
        call_later(ASK_EVERY_S, lambda: self.watch(tracer, call_later))

    def take(self, answer: TimeTold) -> None:
        """Takes an answer, in the thread of the connection to the scheduler."""
        sample = sample_of(answer, now_ns())
        if self._best is None or sample.round_trip_ns < self._best.round_trip_ns:
            self._best = sample
        self._left -= 1
        if self._left > 0:
            self._ask()
        elif self._tracer is not None:
            self._tracer.clock(self._best)

    def _ask(self) -> None:
        self._send(AskTime(now_ns()))


def sample_of(answer: TimeTold, now: int) -> ClockSample:
    """Clock sample of an answer that arrived at `now`, in nanoseconds of this process's clock."""
    there_ns = answer.received_ns - answer.asked_ns
    back_ns = answer.sent_ns - now
    round_trip_ns = (now - answer.asked_ns) - (answer.sent_ns - answer.received_ns)
    return ClockSample((answer.asked_ns + now) // 2, (there_ns + back_ns) // 2, round_trip_ns)
