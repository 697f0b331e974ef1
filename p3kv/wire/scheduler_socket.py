"""A node's ZeroMQ socket to the scheduler, for one connection, and what its events say: another
program may hold the port, or the scheduler may have another secret."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import Deque, List, Optional, Tuple, Union

import zmq

from p3kv.common import words
from p3kv.common.addresses import endpoint
from p3kv.common.version import VERSION
from p3kv.config import Launch, Settings
from p3kv.errors import ProtocolError, RendezvousError
from p3kv.wire.address import other_account_at, own_account
from p3kv.wire.credentials import Credentials
from p3kv.wire.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, TOKEN_BYTES, Hello

RETURN_S = 3.0
"""How long a node and the scheduler wait for each other when their connection has ended. A process
that lives connects again at once; one that has ended never does, and nothing else tells them
apart."""

_NUMBERS = struct.Struct("<QQ")
"""A message's number, and that of the last message that its sender has received."""


class Session:
    """One end: numbers messages, and keeps them until the other end has received them. So each
    message arrives once and in order, whatever connections lose."""

    def __init__(self) -> None:
        self.received = 0
        """The number of the last message that has come."""
        self._sent = 0
        self._kept: Deque[Tuple[int, bytes]] = deque()

    @property
    def all_arrived(self) -> bool:
        """Whether the other end is known to have all messages."""
        return not self._kept

    def keep(self, data: bytes) -> List[bytes]:
        """The parts to send of a new message."""
        self._sent += 1
        self._kept.append((self._sent, data))
        return self._parts(self._sent, data)

    def take(self, numbers: Union[bytes, memoryview]) -> None:
        """Takes note of a message that has come, with these numbers; ProtocolError if it is not the
        next one, or if they can't be right."""
        if len(numbers) != _NUMBERS.size:
            raise ProtocolError(f"a message has {len(numbers)} bytes of numbers")
        number, arrived = _NUMBERS.unpack(numbers)
        if number != self.received + 1:
            raise ProtocolError(f"message {number} came after message {self.received}")
        self.received = number
        self._forget(arrived)

    def again(self, arrived: int) -> List[List[bytes]]:
        """Messages to send on a new connection, if the other end has received `arrived` messages;
        ProtocolError if it can't have."""
        self._forget(arrived)
        if arrived + len(self._kept) != self._sent:
            raise ProtocolError(f"it has {arrived} messages now, and had more before")
        return [self._parts(number, data) for number, data in self._kept]

    def _forget(self, arrived: int) -> None:
        if arrived > self._sent:
            raise ProtocolError(f"it has {arrived} messages, and {self._sent} were sent")
        while self._kept and self._kept[0][0] <= arrived:
            self._kept.popleft()

    def _parts(self, number: int, data: bytes) -> List[bytes]:
        return [data, _NUMBERS.pack(number, self.received)]


_EVENT = struct.Struct("=Hi")


def receive_event(monitor: zmq.Socket) -> Tuple[int, int]:
    """An event and its value from a socket's monitor; waits for one. `zmq.utils.monitor` reads them
    as well, and imports asyncio, which takes each process of a job a tenth of its start."""
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value


_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    | _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)  # fmt: skip
"""The events that the monitor must report."""

_ANSWER_S = 3.0
"""A scheduler answers at once; after a longer silence, what listens is another program."""
_MOST_REFUSALS = 4
"""A scheduler may end while this process connects. One that refuses does so each time."""


class FirstContact:
    """Reads a ZeroMQ monitor's events. Belongs to one thread, but for `silence`."""

    def __init__(self, launch: Launch) -> None:
        self._address = endpoint(launch.root_host, launch.root_port)
        self._port = launch.root_port
        self._variables = launch.variables
        self._has_secret = bool(launch.secret)
        self._refusals = 0
        self._failed = False
        """The handshake on the last connection has failed, for a reason that ZeroMQ has told."""
        self._connected = False
        self._handshaken_at: Optional[float] = None

    @property
    def deadline(self) -> Optional[float]:
        """When, on the monotonic clock, the scheduler must have answered."""
        return None if self._handshaken_at is None else self._handshaken_at + _ANSWER_S

    def event(self, event: int, value: int) -> Optional[RendezvousError]:
        """Takes an event and its value; returns the error when it shows that no scheduler will
        answer."""
        if event == zmq.EVENT_CONNECTED:
            self._connected, self._failed = True, False
        elif event == zmq.EVENT_CLOSED:
            self._connected = False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handshaken_at = time.monotonic()
        elif event & _REFUSED:
            self._failed = True
            self._refusals += 1
            return self.refused() if self._refusals >= _MOST_REFUSALS else None
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._failed = True
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return self.no_answer()
            return self.refused()
        elif event == zmq.EVENT_DISCONNECTED and self._handshaken_at is None:
            # ZeroMQ tells nothing more of what does not begin as ZeroMQ does.
            return None if self._failed else self.foreign()
        elif event == zmq.EVENT_DISCONNECTED:
            return RendezvousError(
                f"what listened at {self._address} ended the connection instead of answering. If "
                f"it was the scheduler, see its own output for why it ended. {_import_first()}"
            )
        return None

    def no_answer(self) -> RendezvousError:
        """The error when `deadline` has passed."""
        return RendezvousError(
            f"what listens at {self._address} does not answer as a p3kv scheduler does, though "
            f"it speaks ZeroMQ; install the same p3kv everywhere. {_import_first()}"
        )

    def refused(self) -> RendezvousError:
        """The error when what listens ends the handshake again and again."""
        mine = "a secret, and this one has none"
        if self._has_secret:
            mine = "another secret than this process, or none"
        else:
            account = other_account_at(self._port)
            if account is not None:
                return RendezvousError(
                    f"what listens at {self._address} is of another account, {account}, and this "
                    f"process is of {own_account()}. Without a secret, a job has processes of one "
                    "account only. Give each job a port of its own "
                    f"({self._variables.port}); a job of several accounts needs the same "
                    "P3KV_SECRET in all its processes"
                )
        return RendezvousError(
            f"what listens at {self._address} refuses this process, or does not answer as a p3kv "
            f"scheduler does. If it is this job's scheduler, it has {mine}: set P3KV_SECRET (or "
            "P3KV_SECRET_FILE) to the same in all processes of the job, and install the same p3kv "
            f"everywhere. {_import_first()}"
        )

    def foreign(self) -> RendezvousError:
        """The error when a message that arrived is not a scheduler's."""
        return RendezvousError(
            f"what listens at {self._address} is no p3kv scheduler: it speaks another protocol. "
            f"{self._other_port()}"
        )

    def waiting(self, timeout_s: float) -> str:
        """Line to log while the scheduler may still answer."""
        if self._connected:
            seen = (
                "what listens there has not answered yet: the scheduler starts, or its host is "
                "busy, or it is another program's port"
            )
        else:
            seen = "nothing listens there yet; is the scheduler started, and is this its address?"
        return (
            f"waiting for a p3kv scheduler at {self._address}: {seen} (P3KV_RENDEZVOUS_TIMEOUT_S "
            f"ends the wait after {timeout_s:g} s)"
        )

    def silence(self, waited_s: float) -> RendezvousError:
        """The error when the rendezvous has taken too long."""
        start = f"no p3kv scheduler answered at {self._address} within {waited_s:g} s"
        if self._connected:
            return RendezvousError(
                f"{start}: what listens there accepts connections and says nothing that a "
                f"scheduler says. {self._other_port()}"
            )
        return RendezvousError(
            f"{start}: nothing listens there. Start the scheduler process, or see its own output "
            f"for why it ended; {self._variables.host} and {self._variables.port} must be the "
            "scheduler's, and P3KV_RENDEZVOUS_TIMEOUT_S lets others wait longer for it. "
            f"{_import_first()}"
        )

    def _other_port(self) -> str:
        return (
            f"Another program holds the port: choose another {self._variables.port} ('p3kv launch' "
            "finds a free one), or end that program."
        )


def _import_first() -> str:
    return (
        "If the launcher starts this script in every role, 'import p3kv' must be its first import: "
        f"where {words.current().native_roles}. 'p3kv run script.py' does it for a script that "
        "can't change."
    )


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
