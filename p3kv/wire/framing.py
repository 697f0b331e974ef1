"""Data frames to and from a stream of bytes, without any input or output.

The reader says where the next bytes should go, so that a slice's elements are received directly
where they belong. The writer says which bytes come next; it decides at the last moment which frame
is the most urgent.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, List, NamedTuple, Optional, Tuple, Union

from p3kv.wire.header import HEADER_BYTES, Header, unpack_header, with_payload_bytes
from p3kv.wire.messages import decode
from p3kv.wire.queue import PriorityQueue

_READ_AHEAD_BYTES = 16 * 1024
_BATCH_BYTES = 16 * 1024
_MAX_BUFFERS = 256


class Landing(NamedTuple):
    """Where a frame's payload goes, and what to do when all of it is there."""

    memory: Optional[memoryview]
    """`payload_bytes` of writable memory, None if there are none."""
    arrived: Callable[[], None]


Land = Callable[[Header], Landing]
"""Takes a frame whose header has arrived. Raises ProtocolError for a frame that must not come."""


def message_landing(header: Header, expected: Any, take: Callable[[Any], None]) -> Landing:
    """A landing for a frame that carries a message of the expected type, which `take` gets."""
    words = memoryview(bytearray(header.payload_bytes))
    return Landing(words, lambda: take(decode(words, expected)))


class FrameReader:
    """Turns received bytes into frames, each of which `land` gives a landing.

    Bytes are received into `buffers()`: first the missing bytes of the current payload, then a
    small read-ahead buffer, from which the reader takes further headers and small payloads.
    """

    def __init__(self, land: Land) -> None:
        self._land = land
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead_start = 0
        self._ahead_end = 0
        self._landing: Optional[Landing] = None
        self._missing: memoryview = self._ahead[:0]

    def buffers(self) -> List[memoryview]:
        """Where the next received bytes go, in this order."""
        held = self._ahead_end - self._ahead_start
        if self._ahead_start:
            self._ahead[:held] = self._ahead[self._ahead_start : self._ahead_end]
            self._ahead_start, self._ahead_end = 0, held
        free = self._ahead[self._ahead_end :]
        return [self._missing, free] if len(self._missing) else [free]

    def received(self, count: int) -> None:
        """Takes `count` bytes that are in `buffers()`; frames that are complete now have arrived.

        A frame arrives before the next one gets its landing, because its arrival may decide where
        the next one goes. Raises what `land` and `arrived` raise.
        """
        direct = min(count, len(self._missing))
        self._missing = self._missing[direct:]
        self._ahead_end += count - direct
        while not len(self._missing):
            landing = self._landing
            if landing is not None:
                self._landing = None
                landing.arrived()
            if self._ahead_end - self._ahead_start < HEADER_BYTES:
                break
            header = unpack_header(self._ahead, self._ahead_start)
            self._ahead_start += HEADER_BYTES
            self._landing = self._land(header)
            memory = self._landing.memory
            if memory is not None:
                self._missing = memory
                self._fill_from_ahead()

    def _fill_from_ahead(self) -> None:
        count = min(len(self._missing), self._ahead_end - self._ahead_start)
        if count:
            self._missing[:count] = self._ahead[self._ahead_start : self._ahead_start + count]
            self._missing = self._missing[count:]
            self._ahead_start += count


Payload = Union[memoryview, Callable[[], memoryview]]
"""A frame's payload, or what makes it when the frame begins to leave."""


class _Outgoing:
    __slots__ = ("header", "on_sent", "payload")

    def __init__(
        self,
        header: bytes,
        payload: Optional[Payload],
        on_sent: Optional[Callable[[], None]],
    ) -> None:
        self.header = header
        self.payload = payload
        self.on_sent = on_sent


class FrameWriter:
    """Turns queued frames into bytes to send, the most urgent frame first.

    No frame overtakes one that has begun. Small frames are sent together, so that a thousand tiny
    tensors do not cost a thousand system calls.
    """

    def __init__(self) -> None:
        self._queue: PriorityQueue[_Outgoing] = PriorityQueue()
        self._buffers: Deque[memoryview] = deque()
        self._begun: Deque[Tuple[int, _Outgoing]] = deque()
        self.sent_bytes = 0
        self.begun_frames = 0
        self.begun_bytes = 0
        """Frames that have begun, and their bytes: no frame overtakes them."""

    def push(
        self,
        priority: int,
        header: bytes,
        payload: Optional[Payload] = None,
        on_sent: Optional[Callable[[], None]] = None,
    ) -> None:
        """Queues a frame. `payload` must stay as it is until `on_sent` is called.

        If the payload is made later, the header gets its size then.
        """
        self._queue.push(priority, _Outgoing(header, payload, on_sent))

    def __bool__(self) -> bool:
        return bool(self._buffers) or len(self._queue) > 0

    def __len__(self) -> int:
        """Frames that have not left."""
        return len(self._queue) + len(self._begun)

    def top_priority(self) -> int:
        """Priority of the frame that would begin next; a frame that has begun is above all."""
        return 2**31 if self._buffers else self._queue.top_priority()

    def waiting_priority(self) -> Optional[int]:
        """Priority of the most urgent frame that has not begun; None if there is none."""
        return self._queue.top_priority() if len(self._queue) else None

    def buffers(self) -> Deque[memoryview]:
        """The next bytes to send; empty when there are none."""
        if not self._buffers:
            self._begin_frames()
        return self._buffers

    def sent(self, count: int) -> None:
        """Removes the first `count` bytes of `buffers()`, which are sent."""
        self.sent_bytes += count
        buffers = self._buffers
        while count:
            first = buffers[0]
            if count < len(first):
                buffers[0] = first[count:]
                break
            count -= len(first)
            buffers.popleft()
        while self._begun and self._begun[0][0] <= self.sent_bytes:
            frame = self._begun.popleft()[1]
            if frame.on_sent is not None:
                frame.on_sent()

    def _begin_frames(self) -> None:
        batch_bytes = 0
        while len(self._queue) and batch_bytes < _BATCH_BYTES and len(self._buffers) < _MAX_BUFFERS:
            frame = self._queue.pop()
            header, payload = frame.header, frame.payload
            if callable(payload):
                payload = payload()
                header = with_payload_bytes(header, len(payload))
            self._buffers.append(memoryview(header))
            frame_bytes = len(header)
            if payload is not None and len(payload):
                self._buffers.append(payload)
                frame_bytes += len(payload)
            batch_bytes += frame_bytes
            self.begun_frames += 1
            self.begun_bytes += frame_bytes
            self._begun.append((self.begun_bytes, frame))
