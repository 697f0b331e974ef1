"""Handlers of frames for tests, frames that come to one without a network, and those that leave."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from p3kv.wire.connection import Connection, Handler
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame, Pieces


class Nobody(Handler):
    """Takes no frame, and loses no connection."""

    arrivals, landings = {}, {}

    def lost(self, connection: Connection, reason: str) -> None:
        raise AssertionError(f"nothing comes, and nobody is lost: {reason}")


class Losing(Handler):
    """Takes no frame, and notes why connections are lost."""

    arrivals, landings = {}, {}

    def __init__(self) -> None:
        self.reasons: List[str] = []

    def lost(self, connection: Connection, reason: str) -> None:
        self.reasons.append(reason)


def take(handler: Any, connection: Connection, header: Header, payload: Any = None) -> None:
    """Has a handler take a frame; `payload` are its bytes, or the message that it is."""
    land = handler.landings.get(header.kind)
    if land is not None:
        memory, landed = land(connection, header)
        if memory:
            memory[:] = payload
        payload = landed
    handler.arrivals[header.kind](connection, header, payload)


class Told(Frame):
    """A frame that tells a test what becomes of it."""

    __slots__ = ("_arrived", "_make", "_sent")

    def __init__(
        self,
        priority: int,
        header: Header,
        payload: Optional[Pieces] = None,
        in_turn: bool = False,
        make: Optional[Callable[[], Pieces]] = None,
        sent: Callable[[], Any] = lambda: None,
        arrived: Callable[[], Any] = lambda: None,
    ) -> None:
        """`make` makes the payload when the frame begins to leave."""
        super().__init__(priority, header, payload, in_turn)
        self._make, self._sent, self._arrived = make, sent, arrived

    def begin(self) -> Optional[Pieces]:
        return self.payload if self._make is None else self._make()

    def sent(self) -> None:
        self._sent()

    def arrived(self) -> None:
        self._arrived()
