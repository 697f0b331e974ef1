"""How long a process may be silent: stopped, swapping, or behind a link that is cut.

The kernel keeps what was sent to such a process and delivers it later, so nothing is lost and the
job goes on when the process answers again. A process that has ended is noticed at once, by the end
of its connections.
"""

from __future__ import annotations

import math
import time
from typing import Optional

from p3kv.wire.messages import PeerSilent
from p3kv.wire.scheduler_socket import RETURN_S

SILENT_S = 5.0
"""If a process was heard from within this time and its connection ends, the process has ended.
After a longer silence it may be stopped."""
SILENT_HINT = "Its process is stopped, its host is too busy, or the network between is cut."


class Silence:
    """When one process was heard of, and when to warn that it is silent.

    Warns after `warn_after_s`, or `SILENT_S` if that is longer, and whenever the silence has
    doubled. Times are of the monotonic clock.
    """

    def __init__(self, now: float, warn_after_s: float) -> None:
        self.heard_at = now
        self._first_s = self._next_s = max(warn_after_s, SILENT_S)

    def lasts_s(self, now: float) -> float:
        """For how long nothing has been heard."""
        return now - self.heard_at

    def due_s(self, now: float) -> Optional[float]:
        """How long the silence is, if it is time to warn; once for each time."""
        silent_s = self.lasts_s(now)
        if silent_s < self._next_s:
            return None
        while self._next_s <= silent_s:
            self._next_s *= 2
        return silent_s

    def heard(self, now: float) -> Optional[float]:
        """Takes note of a sign of life; returns how long the silence was, if it was warned of."""
        silent_s = self.lasts_s(now)
        warned = self._next_s > self._first_s
        self.heard_at, self._next_s = now, self._first_s
        return silent_s if warned else None

    def waits_s(self, now: float, timeout_s: float) -> float:
        """How long to wait for the process when its connection has ended: not at all if that came
        from a silence of `timeout_s`, which is all that is allowed."""
        return 0.0 if self.lasts_s(now) >= timeout_s else RETURN_S

    def leave_out(self, pause_s: float, now: float) -> None:
        """This process was stopped itself for so long, and could not hear anybody."""
        self.heard_at = min(now, self.heard_at + pause_s)


class OwnPauses:
    """Tells from looks that come late that this process was stopped itself. What others sent
    meanwhile is still to be read, so the time of a pause proves nothing of them."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: how often this process means to look."""
        self._every_s = every_s
        self._due_at = math.inf

    def look(self, now: float) -> float:
        """How long the pause was from which this process has just returned; 0 if it had none."""
        late_s = now - self._due_at
        self._due_at = now + self._every_s
        return late_s if late_s > self._every_s else 0.0


def for_so_long(silent_s: float) -> str:
    """'7 s, and was last heard of at 14:03:12', by this host's clock."""
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
    return f"{silent_s:.0f} s, and was last heard of at {clock}"


def words(told: PeerSilent) -> str:
    """Line to log of a process that is silent, or that answers again."""
    if told.answers:
        return f"{told.who} answers again, after {told.silent_s:.0f} s"
    return (
        f"{told.who} has not answered for {for_so_long(told.silent_s)}. {SILENT_HINT} The job goes "
        f"on when it answers, and ends if it is silent for {told.timeout_s:.0f} s "
        "(P3KV_SILENCE_TIMEOUT_S)."
    )
