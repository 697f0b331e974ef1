"""Handlers of frames for tests, and frames that come to one without a network."""

from __future__ import annotations

from typing import Any, List

from p3kv.wire.connection import Connection, Handler
from p3kv.wire.fields import Header


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
