"""Interface of a transport: a server listens, workers connect, and both have a link of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import List, Sequence, Tuple

from p3kv.common.registry import Registry
from p3kv.config import Settings

MAX_ADDRESS = 2**32 - 1
Address = Tuple[str, int]
"""Host and number, for example a port, by which a transport finds a listener. The number is from 0
to `MAX_ADDRESS`."""


class Link(ABC):
    """A stream of bytes to another process, in both directions, that never blocks.

    Belongs to one thread. `receive_into` and `send` may raise OSError: the link is broken then.
    `receive_into` may raise ProtocolError: the peer does not speak as the transport does.
    """

    descriptor: int
    """Descriptor that epoll watches: readable when bytes have come or the peer has closed, writable
    when there is room for more."""
    place = "from an unknown place"
    """Where the peer is, in messages: "from 10.0.0.7"."""
    is_known = False
    """The peer has shown that it has the job's key, in a handshake that the transport has."""
    holds_more = False
    """There may be bytes of which `descriptor` does not tell, since they have been read from there:
    `receive_into` is to be called again."""

    @abstractmethod
    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """Receives bytes into `buffers`, in their order, and returns how many; 0 if the peer has
        closed the link. Raises BlockingIOError while nothing has come."""

    @abstractmethod
    def send(self, buffers: Sequence[memoryview]) -> int:
        """Takes the first bytes of `buffers`, and returns how many; the caller may change these
        afterwards. The next call begins with the bytes that were not taken. Raises BlockingIOError
        while there is no room."""

    def wake_at(self, size_bytes: int) -> None:  # noqa: B027  it may be of no use to a link
        """Says how many bytes must have come before `descriptor` need be readable. A link may tell
        of fewer; it tells at once when the peer has closed it."""

    @abstractmethod
    def hold_at_most(self, size_bytes: int) -> None:
        """Limits the bytes that are taken and not yet sent, about; does nothing to a link that is
        broken or closed.

        No frame overtakes these bytes, so priorities need this limit.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the link; may be called twice."""


class Listener(ABC):
    """Where a server's links come in."""

    address: Address
    """Where workers connect to; on the host that `listen` was given."""
    descriptor: int
    """Descriptor that epoll watches: readable when a peer waits."""

    @abstractmethod
    def accept(self, most: int) -> Tuple[List[Link], bool]:
        """The links that wait now, at most `most`, and whether the system has no room for another.

        Without room, peers wait until this process closes a descriptor.
        """

    @abstractmethod
    def close(self) -> None:
        """Accepts nothing any more; may be called twice."""


class Transport(ABC):
    """Makes links between processes."""

    def __init__(self, silence_timeout_s: float = Settings.silence_timeout_s) -> None:
        """A link to a host that can't be reached must go on when the host can be reached again
        within this time."""
        self.silence_timeout_s = silence_timeout_s

    @abstractmethod
    def listen(self, host: str) -> Listener:
        """Listens at an address of its own on `host`; OSError when that fails."""

    @abstractmethod
    def connect(self, address: Address, timeout_s: float) -> Link:
        """A link to the listener at `address`; OSError if there is none within the time."""


TRANSPORTS: Registry[Transport] = Registry("transport", "every worker and server", "P3KV_TRANSPORT")
"""Transports by name. A server tells workers its own by this name, so both must know it."""
