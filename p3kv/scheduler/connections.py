"""The scheduler's connections, as ZeroMQ reports them: which are open, and whose they are.

ZeroMQ accepts connections itself, and closes those whose handshake fails or takes too long. It has
no limit on their number. So this closes the oldest of too many that no process of the job uses.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Dict, List, NamedTuple, Optional

import zmq

from p3kv.common import words
from p3kv.wire.accounts import own_account
from p3kv.wire.monitor import receive_event
from p3kv.wire.refusals import Refusals

_HUNG_UP = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _HUNG_UP
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _REFUSED
"""The events that the monitor must report."""

_MAX_STRANGERS = 128
"""Connections that may be open without a process of the job on them, besides one for each process,
as all may come at the same time. A process says hello at once."""
_IPV4 = "::ffff:"


class _Place(NamedTuple):
    """Where a connection comes from: no two that are open at the same time have the same."""

    host: str
    port: int


class Connections:
    """Follows the events of a ZeroMQ monitor. The system reuses a descriptor's number at once, so
    events are taken in their order, and all that have come before anything is decided."""

    def __init__(
        self, monitor: zmq.Socket, num_processes: int, refusals: Refusals, has_secret: bool
    ) -> None:
        """`num_processes` of the job will connect. A job without a secret is one account's."""
        self._has_secret = has_secret
        self._monitor = monitor
        self._most_strangers = _MAX_STRANGERS + num_processes
        self._refusals = refusals
        self._nodes: Dict[int, bytes] = {}
        """By descriptor, the node's identity."""
        self._strangers: Dict[int, Optional[_Place]] = {}
        """Where other open connections come from, the oldest first."""
        self._failure: Optional[int] = None
        """ZeroMQ's number of a failure, or _HUNG_UP; the next event tells which peer."""

    def notice(self) -> List[bytes]:
        """Takes the events that have come; returns the nodes whose connections have ended."""
        lost = []
        while self._monitor.poll(0):
            event, value = receive_event(self._monitor)
            if event == zmq.EVENT_ACCEPTED:
                self._strangers[value] = _place_of(value)
            elif event & _REFUSED:
                self._failure = _HUNG_UP if event == _HUNG_UP else value
            else:
                node = self._ended(value)
                if node is not None:
                    lost.append(node)
        self._close_too_many()
        return lost

    def is_of(self, descriptor: int, identity: bytes) -> bool:
        """Takes note that a node speaks on a connection; False if that has ended since.

        Call `notice` first: events of earlier connections with the same descriptor must not be
        taken for the end of this one.
        """
        if descriptor not in self._strangers:
            return False
        del self._strangers[descriptor]
        self._nodes[descriptor] = identity
        return True

    def _ended(self, descriptor: int) -> Optional[bytes]:
        failure, self._failure = self._failure, None
        if descriptor in self._strangers:
            place = self._strangers.pop(descriptor)
            if failure is not None:
                host = "an unknown host" if place is None else place.host
                self._refusals.note(_what_failed(failure, host, self._has_secret))
        return self._nodes.pop(descriptor, None)

    def _close_too_many(self) -> None:
        while len(self._strangers) > self._most_strangers:
            descriptor, place = next(iter(self._strangers.items()))
            del self._strangers[descriptor]
            if place is not None:
                self._refusals.note(f"too many newer ones did not say hello either ({place.host})")
                _end(descriptor, place)


def _what_failed(failure: int, host: str, has_secret: bool) -> str:
    if failure in (zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, _HUNG_UP):
        says = words.current()
        # Both sides may see that the other speaks another protocol, and the first one hangs up.
        looked = "only looked whether somebody listens, or " if failure == _HUNG_UP else ""
        return (
            f"a process on {host} {looked}speaks another protocol over ZeroMQ, very likely that of "
            f"{says.native_store}. If it is a worker of this job, its script must 'import p3kv' "
            f"first (or be started with 'p3kv run'), and use {says.use_store}."
        )
    if not has_secret:
        return (
            f"a process on {host} is of another account, or has a secret, or is in a container "
            f"with a /tmp of its own. This job has no secret, so only processes of {own_account()} "
            "can join it. Give each job a port of its own. If it belongs to this job, set the same "
            "P3KV_SECRET (or P3KV_SECRET_FILE) in all its processes."
        )
    return (
        f"a process on {host} does not know this job's secret. If it belongs to this job, give it "
        "the same P3KV_SECRET (or P3KV_SECRET_FILE) as this scheduler has."
    )


def _place_of(descriptor: int) -> Optional[_Place]:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        host, port = connection.getpeername()[:2]
        # A socket for IPv6 and IPv4 shows IPv4 addresses with this prefix.
        return _Place(host[len(_IPV4) :] if host.startswith(_IPV4) else host, port)
    return None


def _end(descriptor: int, place: _Place) -> None:
    """Ends a connection of ZeroMQ's, which then closes it.

    Its thread may have closed it already and the number may be another connection's. So the
    connection is held by a descriptor of our own first, and then compared.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        host, port = connection.getpeername()[:2]
        if (host.endswith(place.host), port) == (True, place.port):
            connection.shutdown(socket.SHUT_RDWR)
