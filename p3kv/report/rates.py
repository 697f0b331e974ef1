"""Rates of a process between two of its reports, and how people read them."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional

from p3kv.report.shares import in_short, shares
from p3kv.wire.messages import Lag, Numbers, WorkerNumbers


class Rates(NamedTuple):
    """Rates of a process in some seconds; the last three are None for a server."""

    send_bytes_s: float
    receive_bytes_s: float
    """Bytes on the wire."""
    queued_frames: int
    inversions: int
    step_s: Optional[float] = None
    """The time of a step; None without one."""
    shares: Optional[Dict[str, float]] = None
    """Shares of the steps' time (`p3kv.report.shares`)."""
    slowest_layer: Optional[str] = None
    staleness: Optional[float] = None
    """How many rounds the values lacked on average with which a worker went on; None where it goes
    on with no others than those of the default rule."""

    @property
    def words(self) -> str:
        """For a line of a log."""
        parts = []
        if self.step_s is not None and self.shares is not None:
            last = f"; waits most for {self.slowest_layer}" if self.slowest_layer else ""
            parts.append(f"{seconds(self.step_s)} a step ({in_short(self.shares)}{last})")
        if self.staleness is not None:
            parts.append(f"values {self.staleness:.2g} rounds old")
        parts += [
            f"{bit_rate(self.send_bytes_s)} out",
            f"{bit_rate(self.receive_bytes_s)} in",
            f"{self.queued_frames} frames queued",
            f"{self.inversions} inversions",
        ]
        return ", ".join(parts)


def rates(before: Numbers, after: Numbers) -> Rates:
    """The rates of one process between two reports."""
    elapsed_s = max(after.uptime_s - before.uptime_s, 1e-6)
    traffic = (
        max(0, after.wire_bytes_sent - before.wire_bytes_sent) / elapsed_s,
        max(0, after.wire_bytes_received - before.wire_bytes_received) / elapsed_s,
        after.queued_frames,
        after.inversions - before.inversions,
    )
    if not isinstance(after, WorkerNumbers) or not isinstance(before, WorkerNumbers):
        return Rates(*traffic)
    values = after.stale_values - before.stale_values
    stale = (after.stale_rounds - before.stale_rounds) / values if values > 0 else None
    steps, step_s = after.steps - before.steps, after.step_s - before.step_s
    if steps <= 0 or step_s <= 0:
        return Rates(*traffic, slowest_layer=after.slowest_layer or None, staleness=stale)
    found = shares(after, before)
    return Rates(*traffic, step_s / steps, found, after.slowest_layer or None, stale)


def lag_words(lag: Lag) -> str:
    """Says which worker the others wait for, and how long."""
    return f"worker {lag.rank} comes last in {lag.share:.0%} of the rounds, by {seconds(lag.lag_s)}"


def seconds(count: float) -> str:
    """'0.41 s' or '12 ms'."""
    return f"{count:.3g} s" if count >= 0.1 else f"{count * 1000:.3g} ms"


def bit_rate(bytes_s: float) -> str:
    """'940 Mbit/s' or '9.4 Gbit/s'."""
    bit_s = 8 * bytes_s
    return f"{bit_s / 1e9:.3g} Gbit/s" if bit_s >= 1e9 else f"{bit_s / 1e6:.3g} Mbit/s"
