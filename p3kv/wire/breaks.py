"""Connections whose link has ended, until another link takes its place."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Callable, Dict

from p3kv.wire.connection import Connection
from p3kv.wire.control import ALIVE_EVERY_S
from p3kv.wire.messages import Failure

_log = logging.getLogger(__name__)

_WARN_AFTER_S = ALIVE_EVERY_S + 2.0
"""A new link usually comes sooner; and if the peer has ended, so does the reason, though a killed
process may still come back for 3 s as far as the scheduler knows. The peer may also have found what
ends the job, such as a silent scheduler, a sign of life earlier than this process."""
_HINT = (
    "The network between is cut, or it resets connections. P3KV_SILENCE_TIMEOUT_S lets the job "
    "wait longer."
)


@dataclass
class _Break:
    reason: str
    round: int
    since: float
    """On the monotonic clock."""
    at: str
    """By this host's clock, for messages."""


class Breaks:
    """Warns of connections without a link, and gives them up when the job has waited long enough.

    Belongs to the thread of the event loop.
    """

    def __init__(
        self,
        role: str,
        timeout_s: float,
        call_later: Callable[[float, Callable[[], None]], None],
        report: Callable[[Failure], None],
        give_up: Callable[[Failure], None],
    ) -> None:
        """`role` is that of the peers. `report` is told at once of each link that ends: the peer's
        process may have ended, and others know that better. `give_up` is told after `timeout_s`."""
        self._role = role
        self._timeout_s = timeout_s
        self._call_later = call_later
        self._report = report
        self._give_up = give_up
        self._breaks: Dict[Connection, _Break] = {}

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._breaks

    def begin(self, connection: Connection, reason: str, round: int) -> None:
        """Takes note that a connection's link has ended; `round` is the last one that is known."""
        if connection in self._breaks:
            return
        broken = _Break(reason, round, time.monotonic(), time.strftime("%H:%M:%S"))
        self._breaks[connection] = broken
        self._report(self._failure(connection, broken, reason))
        self._call_later(_WARN_AFTER_S, lambda: self._warn(connection, broken))
        self._call_later(self._timeout_s, lambda: self._end(connection, broken))

    def mended(self, connection: Connection) -> None:
        """Takes note that a connection has another link."""
        broken = self._breaks.pop(connection, None)
        if broken is not None:
            _log.warning(
                "%s has a new connection to this process after %.1f s: %s at %s",
                self._name(connection), time.monotonic() - broken.since, broken.reason, broken.at,
            )  # fmt: skip

    def clear(self) -> None:
        """Nobody waits for another link any more."""
        self._breaks.clear()

    def _warn(self, connection: Connection, broken: _Break) -> None:
        if self._breaks.get(connection) is broken:
            _log.warning(
                "%s has no connection to this process since %s: %s. The job goes on when there is "
                "a new one, and ends if this takes %g s (P3KV_SILENCE_TIMEOUT_S).",
                self._name(connection), broken.at, broken.reason, self._timeout_s,
            )  # fmt: skip

    def _end(self, connection: Connection, broken: _Break) -> None:
        if self._breaks.get(connection) is broken:
            del self._breaks[connection]
            reason = (
                f"it was lost: {broken.reason} at {broken.at}, and no new connection could be made "
                f"for {self._timeout_s:g} s"
            )
            self._give_up(self._failure(connection, broken, reason))

    def _failure(self, connection: Connection, broken: _Break, reason: str) -> Failure:
        assert connection.peer is not None
        return Failure(reason, self._role, connection.peer, broken.round, hint=_HINT)

    def _name(self, connection: Connection) -> str:
        return f"{self._role} {connection.peer} ({connection.place})"
