"""Connections whose link has ended, until bytes get through another link."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Dict, Optional

from p3kv.wire.connection import Connection
from p3kv.wire.control import ALIVE_EVERY_S, ControlClient
from p3kv.wire.loop import Loop
from p3kv.wire.messages import Failure, LinkEnded

_log = logging.getLogger(__name__)

_WARN_AFTER_S = ALIVE_EVERY_S + 2.0
"""A new link usually comes sooner; and if the peer has ended, so does the reason, though a killed
process may still come back for 3 s as far as the scheduler knows. The peer may also have found what
ends the job, such as a silent scheduler, a sign of life earlier than this process."""
_TELL_EVERY_S = 60.0
"""People are told the same of a peer so often at most: links may end many times a second."""
_HINT = (
    "The network between is cut, resets connections or changes what they carry. "
    "P3KV_SILENCE_TIMEOUT_S lets the job wait longer."
)


@dataclass
class _Break:
    """The time since a link ended, until bytes have got through another one."""

    reason: str
    round: int
    at: str
    """By this host's clock, for messages."""
    carried_bytes: int
    """Bytes that the connection had carried."""
    links: int = 0
    """How many links were made since then."""
    lost_s: float = 0.0
    """How long there was no link, before the newest one was made."""
    since: Optional[float] = None
    """On the monotonic clock: since when there is no link; None while there is one."""
    warned: bool = False

    def now_lost_s(self) -> float:
        """How long there was no link in all."""
        return self.lost_s + (0.0 if self.since is None else time.monotonic() - self.since)


class _Seldom:
    """Says of each peer when to tell people, and how often they were not told since."""

    def __init__(self) -> None:
        self._at_s: Dict[Connection, float] = {}
        self._untold: Dict[Connection, int] = {}

    def untold(self, connection: Connection, at_once: bool = False) -> Optional[int]:
        """How often people were not told since they were told last; None if they are not to be
        told now."""
        now_s = time.monotonic()
        if not at_once and now_s < self._at_s.get(connection, -_TELL_EVERY_S) + _TELL_EVERY_S:
            self._untold[connection] = self._untold.get(connection, 0) + 1
            return None
        self._at_s[connection] = now_s
        return self._untold.pop(connection, 0)


class Breaks:
    """Warns of connections without a link, and gives them up when the job has waited long enough.

    A new link alone ends no break: whoever changes bits on the way lets handshakes through, and
    nothing else. So the time without a link counts on until some bytes have got through. The time
    with a link does not count: there may be nothing to say.

    Belongs to the thread of the event loop.
    """

    def __init__(self, role: str, timeout_s: float, loop: Loop, control: ControlClient) -> None:
        """`role` is that of the peers. The scheduler is told at once of each link that ends: the
        peer's process may have ended, and others know that better. After `timeout_s` a peer
        without a link is suspected."""
        self._role = role
        self._timeout_s = timeout_s
        self._loop = loop
        self._control = control
        self._breaks: Dict[Connection, _Break] = {}
        """By connection, the last break: whether it is over shows when the next link ends."""
        self._warnings, self._news = _Seldom(), _Seldom()

    def __contains__(self, connection: Connection) -> bool:
        """Whether a connection has no link, and waits for one."""
        broken = self._breaks.get(connection)
        return broken is not None and broken.since is not None

    def begin(self, connection: Connection, reason: str, round: int) -> int:
        """Takes note that a connection's link has ended; `round` is the last one that is known.
        Returns how many links before it have ended without bytes getting through."""
        broken = self._breaks.get(connection)
        if broken is not None and broken.since is not None:
            return broken.links
        carried_bytes = connection.carried_bytes
        if broken is None or broken.carried_bytes != carried_bytes:
            broken = _Break(reason, round, time.strftime("%H:%M:%S"), carried_bytes)
            self._breaks[connection] = broken
        broken.since = time.monotonic()
        self._control.send(LinkEnded(self._failure(connection, broken, reason)))
        if not broken.warned:
            self._look_after(_WARN_AFTER_S, connection, broken, gives_up=False)
        self._look_after(self._timeout_s, connection, broken, gives_up=True)
        return broken.links

    def reconnected(self, connection: Connection) -> None:
        """Takes note that a connection has another link."""
        broken = self._breaks.get(connection)
        if broken is None or broken.since is None:
            return
        broken.lost_s, broken.since = broken.now_lost_s(), None
        broken.links += 1
        if broken.links == 1:
            untold = self._news.untold(connection, at_once=broken.warned)
            more = f" ({untold} more since the last that was told)" if untold else ""
            _log.log(
                logging.INFO if untold is None else logging.WARNING,
                "%s has a new connection to this process after %.1f s: %s at %s%s",
                self._name(connection), broken.lost_s, broken.reason, broken.at, more,
            )  # fmt: skip

    def clear(self) -> None:
        """Nobody waits for another link any more."""
        self._breaks.clear()

    def _look_after(
        self, lost_s: float, connection: Connection, broken: _Break, gives_up: bool
    ) -> None:
        """Look again when there has been no link for so long."""
        delay_s = max(0.0, lost_s - broken.lost_s)
        self._loop.call_later(delay_s, self._look, connection, broken, broken.since, gives_up)

    def _look(self, connection: Connection, broken: _Break, since: float, gives_up: bool) -> None:
        """Warns of a connection, or gives it up, if it has had no link since then."""
        if self._breaks.get(connection) is broken and broken.since == since:
            (self._end if gives_up else self._warn)(connection, broken)

    def _warn(self, connection: Connection, broken: _Break) -> None:
        broken.warned = self._warnings.untold(connection) is not None
        if not broken.warned:
            return
        vain = ""
        if broken.links:
            vain = f" {broken.links} connections since then have carried nothing."
        _log.warning(
            "%s has no connection to this process since %s: %s.%s The job goes on when there is "
            "a new one, and ends if this takes %g s (P3KV_SILENCE_TIMEOUT_S).",
            self._name(connection), broken.at, broken.reason, vain, self._timeout_s,
        )  # fmt: skip

    def _end(self, connection: Connection, broken: _Break) -> None:
        del self._breaks[connection]
        vain = f"no new connection could be made for {self._timeout_s:g} s"
        if broken.links:
            vain = (
                f"{broken.links} new connections have carried nothing (P3KV_SILENCE_TIMEOUT_S: "
                f"there was none for {self._timeout_s:g} s in all)"
            )
        reason = f"it was lost: {broken.reason} at {broken.at}, and {vain}"
        self._control.suspect(self._failure(connection, broken, reason), second_hand=True)

    def _failure(self, connection: Connection, broken: _Break, reason: str) -> Failure:
        assert connection.peer is not None
        return Failure(reason, self._role, connection.peer, broken.round, hint=_HINT)

    def _name(self, connection: Connection) -> str:
        return f"{self._role} {connection.peer} ({connection.place})"
