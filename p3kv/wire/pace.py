"""Choice of the connections that may send: where it pays, none leaves another one behind."""

from __future__ import annotations

import math
import time
from typing import Collection, Dict, List

from p3kv.wire.connection import Connection

_LEAD = 2.0
"""By how many credits a connection may be ahead: with much less, links run dry."""
_STUCK_S = 1.0
"""A connection that has frames and has sent nothing for so long holds up no other."""


class _Place:
    """How far a connection is."""

    __slots__ = ("credits", "since_s")

    def __init__(self, credits: float, since_s: float) -> None:
        self.credits = credits
        """Amount that it has sent, in its own credits."""
        self.since_s = since_s
        """When it last sent, or had nothing to send."""


class Pace:
    """Keeps connections that have frames to send in step, each by its own credit.

    Connections get about equal parts of a link as soon as each always has bytes for it, however
    many. So one that is to carry twice as much as others would be done last, and its peer's link
    would idle meanwhile. In step, a connection that is ahead waits for the others.
    """

    def __init__(self) -> None:
        self._places: Dict[Connection, _Place] = {}
        self._furthest = math.inf
        """How far a connection may be and still send."""
        self._keeps = False

    @property
    def keeps(self) -> bool:
        """Whether connections are kept in step."""
        return self._keeps

    @keeps.setter
    def keeps(self, keeps: bool) -> None:
        if keeps != self._keeps:
            self._keeps, self._furthest = keeps, math.inf
            self._places.clear()

    def choose(self, connections: Collection[Connection]) -> List[Connection]:
        """Chooses those of a process's connections that have something to send, and can and may."""
        able = [one for one in connections if not one.blocked and one.writer]
        if not self._keeps:
            return able
        self._look(connections)
        return [one for one in able if self.allows(one)]

    def sent(self, connection: Connection, size_bytes: int) -> None:
        """Takes note of what a connection has sent."""
        place = self._places.get(connection)
        if place is not None:
            place.credits += size_bytes / connection.credit_bytes
            place.since_s = time.monotonic()

    def allows(self, connection: Connection) -> bool:
        """Whether the connection is not too far ahead of the others that `choose` saw."""
        place = self._places.get(connection)
        return place is None or place.credits <= self._furthest

    def _look(self, connections: Collection[Connection]) -> None:
        """Finds the connection that is last, and has those that hold up no other keep level."""
        now, last, level = time.monotonic(), math.inf, []
        for one in connections:
            if not one.in_network:
                continue
            place = self._places.get(one)
            if place is None:
                place = self._places[one] = _Place(0.0, now)
            if not one.writer:
                place.since_s = now
            elif now - place.since_s < _STUCK_S:
                last = min(last, place.credits)
                continue
            level.append(place)
        self._furthest = last + _LEAD
        if last < math.inf:
            for place in level:
                place.credits = max(place.credits, last)
