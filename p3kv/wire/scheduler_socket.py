"""A node's ZeroMQ socket to the scheduler, for one connection."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from typing import List, Optional, Tuple

import zmq

from p3kv.common.version import VERSION
from p3kv.config import Launch, Settings
from p3kv.wire.credentials import Credentials
from p3kv.wire.first_contact import EVENTS
from p3kv.wire.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, TOKEN_BYTES, Hello
from p3kv.wire.monitor import receive_event

HEARTBEAT_EVERY_MS = 2000
_SEND_MS = 3000


def heartbeat_timeout_ms(settings: Settings) -> int:
    """For ZeroMQ, which ends a connection after so long a silence."""
    return int(settings.silence_timeout_s * 1000)


def hello(
    launch: Launch,
    settings: Settings,
    listen_address: Tuple[str, int],
    transport: str,
    neighbourhood: str = "",
) -> Hello:
    """How this process introduces itself; it chooses a number for that, so call this once."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        version=VERSION,
        job=launch.job,
        role=launch.role,
        rank=launch.rank,
        task=launch.task,
        host=listen_address[0],
        port=listen_address[1],
        transport=transport,
        pid=os.getpid(),
        encrypts=settings.encrypt,
        process=secrets.token_bytes(TOKEN_BYTES),
        neighbourhood=neighbourhood,
    )


class SchedulerSocket:
    """Connects as soon as somebody listens there. Belongs to one thread."""

    def __init__(
        self, context: zmq.Context, credentials: Credentials, address: str, settings: Settings
    ) -> None:
        """Raises ZMQError for an address that none can be."""
        dealer = self._dealer = context.socket(zmq.DEALER)
        credentials.protect_dealer(dealer)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        # Where no peer is left, sending would wait for ever.
        dealer.setsockopt(zmq.SNDTIMEO, _SEND_MS)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_EVERY_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms(settings))
        self._monitor = dealer.get_monitor_socket(EVENTS)
        dealer.connect(address)

    def send(self, parts: List[bytes]) -> None:
        """Sends a message; it may be lost with the connection."""
        with suppress(zmq.Again):  # no peer could take it
            self._dealer.send_multipart(parts)

    def wait(
        self, wake: socket.socket, timeout_ms: Optional[int]
    ) -> Tuple[List[List[bytes]], List[Tuple[int, int]]]:
        """Waits for messages, events of the connection, or a byte on `wake`, which it reads; at
        most one message and one event of those that have come."""
        poller = zmq.Poller()
        for readable in (self._dealer, self._monitor, wake):
            poller.register(readable, zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        if wake.fileno() in ready:
            wake.recv(4096)
        messages, events = [], []
        if self._dealer in ready:
            messages.append(self._dealer.recv_multipart())
        if self._monitor in ready:
            events.append(receive_event(self._monitor))
        return messages, events

    def close(self) -> None:
        """Ends the connection, and drops what has not left."""
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)
