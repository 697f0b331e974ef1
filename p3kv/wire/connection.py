"""One data connection between a worker and a server, over one link after the other."""

from __future__ import annotations

import fcntl
import struct
import termios
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Callable, Mapping, Optional, Tuple, Type

from p3kv.errors import ProtocolError
from p3kv.transport import Link
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame, FrameReader, FrameWriter
from p3kv.wire.header import ACKNOWLEDGE, URGENT, Kind
from p3kv.wire.messages import Message, decode
from p3kv.wire.protocol import Conversation

_TELL_EVERY_BYTES = 1 << 20
"""How much may arrive without the peer being told: it keeps what it does not know to be here."""
_WAKE_BYTES = 512 * 1024
"""While more of a payload is missing, a process wakes up for so many bytes and not for each packet:
each time takes processor time, whatever has come."""
_BITE_S = 0.01
_BITE_BYTES = 1 << 20
"""Of a large frame that has begun a link holds more than the credit, but no more than it carries in
this time, and no more than so much. No frame overtakes one that has begun, and a process wakes up
each time that a full link has room."""
_ACK = Header(Kind.ACK, 0)

Landing = Tuple[Optional[memoryview], Any]
"""Memory of a payload's size, None if there is no payload; and the payload that `arrivals` gets."""


class Handler(ABC):
    """What a process does with the frames that come over some connections: a method for each kind.

    All belongs to the loop's thread. Methods raise ProtocolError for a frame that can't be right.
    """

    arrivals: Mapping[int, Callable[[Connection, Any, Any], None]]
    """By kind, `take(connection, header, payload)`, when all of a frame has come. The payload is a
    message where the protocol names one; else its memory, or what `landings` gave; else None."""
    landings: Mapping[int, Callable[[Connection, Any], Landing]]
    """By kind, `land(connection, header)`, where the handler decides where a payload goes, or
    refuses it before it comes. It is called when the frame before has been taken, because that may
    decide it. Other payloads get memory of their own (`new_memory`)."""

    @abstractmethod
    def lost(self, connection: Connection, reason: str) -> None:
        """Called once when the peer broke the protocol, and each time when the link has ended."""


def new_memory(header: Header) -> Landing:
    """Memory of its own for a payload, which the handler takes."""
    memory = memoryview(bytearray(header.payload_bytes))
    return memory, memory


class _Ack(Frame):
    """Tells the peer what has arrived."""

    __slots__ = ("connection",)

    def __init__(self, connection: Connection) -> None:
        super().__init__(URGENT, _ACK)
        self.connection = connection

    def sent(self) -> None:
        self.connection.acknowledged()


class Connection:
    """Frames in both directions over a link, driven by a `Loop`.

    When a link has ended, `resume` goes on with another: no byte is lost or comes twice, because
    both ends count them, from the welcome on.
    """

    def __init__(
        self, link: Link, conversation: Conversation, handler: Handler, send_buffer_bytes: int
    ) -> None:
        """`send_buffer_bytes`: the credit, until `hold_at_most` changes it."""
        self.handler = handler
        self._reader = FrameReader()
        self._frame: Optional[Tuple[Header, Optional[Type[Message]], Any]] = None
        """A frame that has begun to arrive: its header, which message it carries, and its payload
        or what the handler takes for it."""
        self.credit_bytes = send_buffer_bytes
        """Most unsent bytes on the link, but of a large frame."""
        self._limit_bytes = send_buffer_bytes
        """The same, as the link has been told last."""
        self._takes_bites = False
        self._rate_bytes_s = 0.0
        """What the link has carried while it was full."""
        self._full: Optional[Tuple[float, int]] = None
        """Since when the link is full, and what it held then; of a large frame."""
        self.conversation = conversation
        self.closed = False
        """Lost, or closed by this process: nothing is sent or received any more."""
        self.ended = False
        """The peer or the network ended the link, and there is no other yet."""
        self.welcome = False
        """Whether the handshake is complete."""
        self.writer = FrameWriter()
        self.sent_bytes = 0
        """Bytes that links have taken, with headers."""
        self._asked = self._telling = False
        """Whether the peer waits to be told what has arrived, and whether an ACK is to leave."""
        self.blocked = False
        """The link is full: it takes no more bytes for now."""
        self.in_network = True
        """Whether the link is one of the network, which is measured and shared out."""
        self._wakes_at = 1
        """How many bytes have to come before the link tells of them."""
        self._use(link)

    @property
    def peer(self) -> Optional[int]:
        """Rank of the peer, once it has shown that it belongs to the job."""
        return self.conversation.peer

    @property
    def received_bytes(self) -> int:
        """Bytes received since the welcome."""
        return self.writer.received_bytes if self.welcome else 0

    @property
    def carried_bytes(self) -> int:
        """Bytes that have got through in both directions, as far as this process knows."""
        return self.received_bytes + self.writer.arrived_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received."""
        return self.sent_bytes + self.received_bytes

    @property
    def is_known(self) -> bool:
        """Whether the link knows that the peer has the job's key; see `Link`."""
        return self._link.is_known

    def receive(self) -> None:
        """Reads once, and what the link holds then; the loop calls again while there is more."""
        self._receive_once()
        self._receive_held()
        wake_at = min(len(self._reader.missing), _WAKE_BYTES) or 1
        if wake_at != self._wakes_at and not self.closed:
            self._wakes_at = wake_at
            self._link.wake_at(wake_at)

    def _receive_held(self) -> None:
        while self._link.holds_more and not self.closed and not self.ended:
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
        self.writer.received_bytes += count
        self._reader.received(count)
        self._take_arrived()

    def send(self) -> int:
        """Writes once, and returns how many bytes; sets `blocked` when the link is full."""
        buffers = self.writer.buffers()
        if self._takes_bites and self.writer.left_bytes > 2 * self.credit_bytes:
            self._take_bite()
        try:
            count = self._link.send(buffers)
        except (BlockingIOError, InterruptedError):
            self.blocked = True
            return 0
        except OSError as error:
            self.blocked = True
            self._end(_translated(error))
            return 0
        self.sent_bytes += count
        self.writer.sent(count)
        self.blocked = self.writer.has_begun
        if self._takes_bites:
            self._end_bite()
        return count

    def _take_bite(self) -> None:
        """Lets the link hold more, as fast as it is, since a large frame leaves."""
        if self._full is not None:
            since_s, held_bytes = self._full
            left_bytes = held_by(self.descriptor)
            rate = (held_bytes - left_bytes) / max(1e-6, time.monotonic() - since_s)
            # One that holds nothing more might have carried more.
            self._rate_bytes_s = rate if left_bytes else max(rate, self._rate_bytes_s)
        wanted_bytes = min(_BITE_BYTES, int(self._rate_bytes_s * _BITE_S))
        if wanted_bytes < 2 * self.credit_bytes:
            wanted_bytes = self.credit_bytes
        if not self._limit_bytes // 2 < wanted_bytes < 2 * self._limit_bytes:
            self._limit(wanted_bytes)

    def _end_bite(self) -> None:
        bites = self._limit_bytes > self.credit_bytes
        if bites and not self.blocked:
            # The next frame begins when the link holds no more than the credit.
            self._limit(self.credit_bytes)
            self.blocked = True
        elif self.writer.left_bytes <= 2 * self.credit_bytes:
            self._full = None
            return
        self._full = time.monotonic(), held_by(self.descriptor)

    def _limit(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        self._link.hold_at_most(size_bytes)

    def end(self, reason: str) -> None:
        """Takes the link for one that the network has ended."""
        self._end(reason)

    def hold_at_most(self, size_bytes: int) -> None:
        """Limits the unsent bytes on the link, and on those that come after it; for good, but while
        a large frame leaves that a fast link soon carries."""
        self.credit_bytes = size_bytes
        self._takes_bites = True
        self._limit(size_bytes)

    def begin(self, preamble: bytes = b"") -> None:
        """The handshake is complete: bytes are counted from here on. A server sends its welcome as
        `preamble`, which is not counted."""
        self.welcome = True
        self.writer = FrameWriter(preamble)
        self.writer.received_bytes = self._reader.ahead_bytes
        self._asked = self._telling = False

    def hand_over(self) -> Tuple[Link, bytes]:
        """The link, and what was received from it behind the handshake's last frame. This
        connection, which made the handshake, is closed then; the loop must not have it any more."""
        self.closed = self.blocked = True
        return self._link, self._reader.take_ahead()

    def take_over(self, link: Link) -> None:
        """Gives up its own link for another, on which the same peer has made a handshake. `resume`
        must follow."""
        self.drop_link()
        self.ended = False
        self._use(link)
        if not self.welcome:
            self._reader, self._frame = FrameReader(), None

    def resume(self, received: int, preamble: bytes = b"", ahead: bytes = b"") -> None:
        """Goes on where the last link has ended: the peer has received `received` bytes. `preamble`
        as in `begin`; `ahead` is what was received from the new link already.

        Raises ProtocolError if the peer can't have received so much, or so little.
        """
        if self.welcome:
            self.writer.resume(received, preamble)
        elif received:
            raise ProtocolError(f"it has received {received} bytes, and none were sent")
        else:
            self.begin(preamble)
        self.blocked = False
        self.writer.received_bytes += len(ahead)
        rest = memoryview(ahead)
        while rest and not self.closed:
            rest = rest[self._reader.feed(rest) :]
            self._take_arrived()
        self._receive_held()

    def drop_link(self) -> None:
        """Closes the link; `take_over` brings another."""
        self.blocked = True
        self.descriptor = -1
        self._link.close()

    def close(self) -> None:
        """Closes the link; the handler hears nothing after it. May be called twice."""
        self.closed = True
        self.drop_link()

    def _use(self, link: Link) -> None:
        self._link = link
        self._wakes_at = 1
        link.wake_at(1)  # another connection may have used it
        self.descriptor = link.descriptor
        self.place = link.place
        self._full = None
        self._limit(self.credit_bytes)

    def _take_arrived(self) -> None:
        """Has the handler take each frame that has arrived, and decide where the next one goes."""
        header: Optional[Header]
        try:
            while not self._reader.missing and not self.closed:
                if self._frame is not None:
                    header, message, payload = self._frame
                    self._frame = None
                    if message is not None:
                        payload = decode(payload, message)
                    self.handler.arrivals[header.kind](self, header, payload)
                    continue
                header = self._reader.next_header()
                if header is None:
                    break
                if self.welcome:
                    if header.received > self.writer.arrived_bytes:
                        self.writer.arrived(header.received)
                    if header.kind == Kind.ACK and not header.payload_bytes:
                        continue
                rule = self.conversation.hear(header)
                if header.flags & ACKNOWLEDGE:
                    self._asked = True
                land = self.handler.landings.get(header.kind)
                if land is not None:
                    memory, payload = land(self, header)
                else:
                    memory, payload = new_memory(header) if rule.most_bytes else (None, None)
                if memory:
                    self._reader.land(memory)
                self._frame = header, rule.message, payload
        except ProtocolError as error:
            self._lose(str(error))
        else:
            self._tell_if_due()

    def _tell_if_due(self) -> None:
        """Has the peer know what has arrived, if it asked for that, or if it was much."""
        owed_bytes = self.writer.received_bytes - self.writer.told_bytes
        due = owed_bytes >= _TELL_EVERY_BYTES or (self._asked and not self._reader.missing)
        if due and self.welcome and not self._telling and not self.closed:
            self._asked = False
            if owed_bytes:
                self._telling = True
                self.writer.push(_Ack(self))

    def acknowledged(self) -> None:
        """An ACK has left: more may have arrived since it began."""
        self._telling = False
        self._tell_if_due()

    def _end(self, reason: str) -> None:
        if not self.closed and not self.ended:
            self.ended = True
            self.handler.lost(self, reason)

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self.ended = False
            self.handler.lost(self, reason)


def held_by(descriptor: int) -> int:
    """Bytes that a socket holds that are not known to have arrived; 0 where nobody knows."""
    with suppress(OSError, ValueError):  # it may be closed already, or no socket
        held: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
        return held
    return 0


def _translated(error: OSError) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "its connection was reset"
    if isinstance(error, TimeoutError):
        return "nothing is heard from its host any more"
    return f"its connection failed: {error.strerror or error}"
