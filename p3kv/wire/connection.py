"""One data connection between a worker and a server."""

from __future__ import annotations

from typing import Callable, Optional

from p3kv.errors import ProtocolError
from p3kv.transport import Link
from p3kv.wire.framing import FrameReader, FrameWriter, Landing
from p3kv.wire.header import Header
from p3kv.wire.protocol import Conversation


class Connection:
    """Frames in both directions over a link, driven by a `Loop`.

    `land(connection, header)` takes every frame that the peer may send now, and
    `on_lost(connection, reason)` is called once, when the peer is gone or broke the protocol.
    """

    def __init__(
        self,
        link: Link,
        conversation: Conversation,
        land: Callable[[Connection, Header], Landing],
        on_lost: Callable[[Connection, str], None],
        send_buffer_bytes: int,
    ) -> None:
        """`send_buffer_bytes`: most unsent bytes on the link, until `hold_at_most` changes it."""
        self._link = link
        self._land = land
        self._on_lost = on_lost
        self._reader = FrameReader(self._hear)
        self.conversation = conversation
        self.closed = False
        """Lost, or closed by this process: nothing is sent or received any more."""
        self.ended = False
        """The peer or the network ended it; False if it was lost for what the peer has sent."""
        self.descriptor = link.descriptor
        self.place = link.place
        self.hold_at_most = link.hold_at_most
        self.hold_at_most(send_buffer_bytes)
        self.writer = FrameWriter()
        self.received_bytes = 0
        self.blocked = False
        """The link is full: it takes no more bytes for now."""

    @property
    def peer(self) -> Optional[int]:
        """Rank of the peer, once it has shown that it belongs to the job."""
        return self.conversation.peer

    @property
    def sent_bytes(self) -> int:
        """Bytes that the link has taken, with headers."""
        return self.writer.sent_bytes

    @property
    def moved_bytes(self) -> int:
        """What was sent and received."""
        return self.sent_bytes + self.received_bytes

    @property
    def is_known(self) -> bool:
        """Whether the link knows that the peer has the job's key; see `Link`."""
        return self._link.is_known

    def receive(self) -> None:
        """Reads once, and what the link holds then; the loop calls again while there is more."""
        self._receive_once()
        while self._link.holds_more and not self.closed:
            self._receive_once()

    def _receive_once(self) -> None:
        try:
            count = self._link.receive_into(self._reader.buffers())
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._lose(str(error))
            return
        except OSError as error:
            self._end(_translated(error))
            return
        if count == 0:
            self._end("it closed the connection")
            return
        self.received_bytes += count
        try:
            self._reader.received(count)
        except ProtocolError as error:
            self._lose(str(error))

    def send(self) -> int:
        """Writes once, and returns how many bytes; sets `blocked` when the link is full."""
        buffers = self.writer.buffers()
        try:
            count = self._link.send(buffers)
        except (BlockingIOError, InterruptedError):
            self.blocked = True
            return 0
        except OSError as error:
            self.blocked = True
            self._end(_translated(error))
            return 0
        self.writer.sent(count)
        self.blocked = len(buffers) > 0
        return count

    def end(self, reason: str) -> None:
        """Takes the link for one that the network has ended."""
        self._end(reason)

    def close(self) -> None:
        """Closes the link; no callback comes after it. May be called twice."""
        self.closed = True
        self.blocked = True
        self._link.close()

    def _hear(self, header: Header) -> Landing:
        self.conversation.hear(header)
        return self._land(self, header)

    def _end(self, reason: str) -> None:
        self.ended = True
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self._on_lost(self, reason)


def _translated(error: OSError) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "its connection was reset"
    if isinstance(error, TimeoutError):
        return "nothing is heard from its host any more"
    return f"its connection failed: {error.strerror or error}"
