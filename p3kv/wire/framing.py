"""Data frames to and from a stream of bytes, without any input or output.

The reader gives one header after the other, and is told where each payload goes, so that a slice's
elements are received directly where they belong. The writer says which bytes come next; it decides
at the last moment which frame is the most urgent.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import islice
from typing import Deque, Generic, Iterator, List, Optional, Tuple, TypeVar, Union

from p3kv.errors import ProtocolError
from p3kv.wire.fields import Header
from p3kv.wire.header import HEADER_BYTES, pack_header, unpack_header

_READ_AHEAD_BYTES = 16 * 1024
_BATCH_BYTES = 16 * 1024
_MAX_BUFFERS = 256
_TURN = -(2**63)

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Gives the item with the largest priority first; of a tie, the oldest item. Not thread-safe: a
    queue belongs to one event loop."""

    __slots__ = ("_arrivals", "heap")

    def __init__(self) -> None:
        self.heap: List[Tuple[int, int, T]] = []
        """Items in the queue; only to be asked whether there are any: it is asked often, and calls
        of Python functions take time."""
        self._arrivals = 0

    def push(self, priority: int, item: T) -> None:
        """Adds an item."""
        self._arrivals += 1
        heapq.heappush(self.heap, (-priority, self._arrivals, item))

    def pop(self) -> T:
        """Takes the first item; IndexError when there is none."""
        return heapq.heappop(self.heap)[2]

    def top_priority(self) -> int:
        """The priority of the item that `pop` would give; IndexError when there is none."""
        return -self.heap[0][0]

    def clear(self) -> List[T]:
        """Empties the queue and returns what was in it, in no particular order."""
        items = list(self)
        self.heap = []
        return items

    def __iter__(self) -> Iterator[T]:
        """Items in the queue, in no particular order."""
        return (item for _, _, item in self.heap)

    def __len__(self) -> int:
        return len(self.heap)


def urgency(step: int, priority: int) -> int:
    """The priority of a slice in a queue: older steps first, then the forward order.

    The paper orders by layer alone. Then a worker that is one iteration ahead fills its links
    with first layers that nobody can use yet, while the last layers of the straggler, which all
    workers wait for, stay in the queue. The order counts steps and not rounds of a key: a layer
    that is trained seldom has had few rounds, and would always be the oldest.
    """
    return priority - (step << 32)


class FrameReader:
    """Turns received bytes into frames.

    Bytes are received into `buffers()`: first the missing bytes of the current payload, then a
    small read-ahead buffer, from which the reader takes further headers and small payloads.
    """

    def __init__(self) -> None:
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead_start = 0
        self._ahead_end = 0
        self.missing: memoryview = self._ahead[:0]
        """Where bytes of the current payload are missing; empty once all of it is there."""

    def buffers(self) -> List[memoryview]:
        """Where the next received bytes go, in this order."""
        held = self._ahead_end - self._ahead_start
        if self._ahead_start:
            self._ahead[:held] = self._ahead[self._ahead_start : self._ahead_end]
            self._ahead_start, self._ahead_end = 0, held
        free = self._ahead[self._ahead_end :]
        return [self.missing, free] if self.missing else [free]

    def received(self, count: int) -> None:
        """Takes `count` bytes that are in `buffers()`; `next_header` must follow."""
        direct = min(count, len(self.missing))
        self.missing = self.missing[direct:]
        self._ahead_end += count - direct

    def next_header(self) -> Optional[Header]:
        """Header of the next frame; None while it has not come, or the payload before has not."""
        if self.missing or self._ahead_end - self._ahead_start < HEADER_BYTES:
            return None
        header = unpack_header(self._ahead, self._ahead_start)
        self._ahead_start += HEADER_BYTES
        return header

    def land(self, memory: memoryview) -> None:
        """Receives the payload that follows the last header into memory of its size."""
        count = min(len(memory), self._ahead_end - self._ahead_start)
        if count:
            memory[:count] = self._ahead[self._ahead_start : self._ahead_start + count]
            self._ahead_start += count
        self.missing = memory[count:]

    @property
    def ahead_bytes(self) -> int:
        """How many bytes were received behind the last frame."""
        return self._ahead_end - self._ahead_start

    def take_ahead(self) -> bytes:
        """These bytes, which this reader then does not read."""
        ahead = bytes(self._ahead[self._ahead_start : self._ahead_end])
        self._ahead_start = self._ahead_end
        return ahead

    def feed(self, data: memoryview) -> int:
        """Takes bytes that another reader has received ahead, as `received`; returns how many."""
        count = 0
        for buffer in self.buffers():
            part = data[count : count + len(buffer)]
            buffer[: len(part)] = part
            count += len(part)
        self.received(count)
        return count


Pieces = Union[memoryview, Tuple[memoryview, ...]]
"""A payload in one piece of memory, or in several."""


def size_of(payload: Pieces) -> int:
    """Bytes of a payload."""
    return sum(map(len, payload)) if isinstance(payload, tuple) else len(payload)


class Frame:
    """A frame that is to leave over one connection. One that makes its payload late, or must know
    what becomes of it, is a subclass that has some of the methods."""

    __slots__ = ("header", "in_turn", "payload", "priority")
    makes_payload = tells_sent = tells_arrived = False
    """Which of the methods a subclass has: most frames have none, and calls take time."""

    def __init_subclass__(cls) -> None:
        cls.makes_payload = cls.begin is not Frame.begin
        cls.tells_sent = cls.sent is not Frame.sent
        cls.tells_arrived = cls.arrived is not Frame.arrived

    def __init__(
        self, priority: int, header: Header, payload: Optional[Pieces] = None, in_turn: bool = False
    ) -> None:
        """`payload` must stay as it is until the peer is known to have it (`arrived`). `in_turn`:
        the frame may have to wait for its turn."""
        self.priority = priority
        self.header = header
        self.payload = payload
        self.in_turn = in_turn

    def begin(self) -> Optional[Pieces]:
        """Makes the payload when the frame begins to leave."""
        return self.payload

    def sent(self) -> None:
        """All of it has left."""

    def arrived(self) -> None:
        """The peer is known to have it."""


_Begun = Tuple[int, List[memoryview], Optional[Frame]]
"""Where a frame ends, its bytes, and the frame if it is to know that it has arrived."""


class FrameWriter:
    """Turns queued frames into bytes to send, the most urgent frame first.

    No frame overtakes one that has begun. Some may also leave in turn, as they were queued, for as
    long as `take_turns` says. Small frames are sent together, so that a thousand tiny tensors do
    not cost a thousand system calls. Frames that have begun are kept until the peer has received
    them: `resume` sends again what a broken link has lost.
    """

    def __init__(self, preamble: bytes = b"") -> None:
        """`preamble` goes before all frames and is not counted."""
        self._queue: PriorityQueue[Frame] = PriorityQueue()
        self._turns: Deque[Frame] = deque()
        """Frames that leave in turn, when the queue is empty."""
        self._takes_turns = False
        self._buffers: Deque[memoryview] = deque([memoryview(preamble)] if preamble else [])
        self._begun: Deque[_Begun] = deque()
        """Frames that have begun and that the peer may not have."""
        self._leaving: Deque[Tuple[int, Frame]] = deque()
        """Frames that are to know when all of them has left, and where they end."""
        self._sent_bytes = -len(preamble)
        self.arrived_bytes = 0
        """Bytes that the peer has received, as far as it has said so."""
        self.received_bytes = 0
        """Bytes that this process has received; the headers of frames say so."""
        self.told_bytes = 0
        """The same, as the newest frame that has begun says it."""
        self.begun_frames = 0
        self.begun_bytes = 0
        """Frames that have begun, and their bytes: no frame overtakes them."""

    def push(self, frame: Frame) -> None:
        """Queues a frame."""
        if frame.in_turn and self._takes_turns:
            self._turns.append(frame)
        else:
            self._queue.push(frame.priority, frame)

    def take_turns(self, turns: bool) -> None:
        """Whether frames that are queued `in_turn` leave one after the other, behind all others;
        when that ends, they go by priority, too."""
        self._takes_turns = turns
        while self._turns and not turns:
            frame = self._turns.popleft()
            self._queue.push(frame.priority, frame)

    def __bool__(self) -> bool:
        return bool(self._buffers or self._turns or self._queue.heap)

    def __len__(self) -> int:
        """Frames that have not begun, and one more while any is leaving; from any thread."""
        return len(self._queue) + len(self._turns) + bool(self._buffers)

    def top_priority(self) -> int:
        """Priority of the frame that would begin next; a frame that has begun is above all, and one
        whose turn it is below all."""
        if self._buffers:
            return 2**31
        return self._queue.top_priority() if self._queue.heap else _TURN

    def waiting_priority(self) -> Optional[int]:
        """Priority of the most urgent frame that has not begun; None if there is none, or if they
        wait for their turn."""
        return self._queue.top_priority() if self._queue.heap else None

    def buffers(self) -> Deque[memoryview]:
        """The next bytes to send; empty when there are none."""
        if not self._buffers:
            self._begin_frames()
        elif len(self._buffers) > 2 * _MAX_BUFFERS:  # all that is sent again
            return deque(islice(self._buffers, _MAX_BUFFERS))
        return self._buffers

    @property
    def left_bytes(self) -> int:
        """Bytes of frames that have begun that are still to be sent."""
        return self.begun_bytes - self._sent_bytes

    @property
    def has_begun(self) -> bool:
        """Whether bytes of frames that have begun are still to be sent."""
        return bool(self._buffers)

    def sent(self, count: int) -> None:
        """Removes the first `count` bytes of `buffers()`, which are sent."""
        self._sent_bytes += count
        buffers = self._buffers
        while count:
            first_bytes = len(buffers[0])
            if count < first_bytes:
                buffers[0] = buffers[0][count:]
                break
            count -= first_bytes
            buffers.popleft()
        while self._leaving and self._leaving[0][0] <= self._sent_bytes:
            self._leaving.popleft()[1].sent()

    def arrived(self, count: int) -> None:
        """Takes note that the peer has received the first `count` bytes; ProtocolError if so many
        were not sent."""
        if count <= self.arrived_bytes:
            return
        # Not only what is known to be sent: a link that encrypts says so later.
        if count > self.begun_bytes:
            raise ProtocolError(f"it has received {count} bytes, and {self.begun_bytes} were sent")
        self.arrived_bytes = count
        begun = self._begun
        while begun and begun[0][0] <= count:
            frame = begun.popleft()[2]
            if frame is not None:
                frame.arrived()

    def resume(self, received: int, preamble: bytes = b"") -> None:
        """Goes on over a new link: after `preamble` comes what the peer has not received, of which
        it has the first `received` bytes. Raises ProtocolError if this can't be."""
        if received < self.arrived_bytes:
            raise ProtocolError(
                f"it has received {received} bytes, and said {self.arrived_bytes} before"
            )
        self._sent_bytes = max(self._sent_bytes, 0)
        self.arrived(received)
        self._buffers.clear()
        if preamble:
            self._buffers.append(memoryview(preamble))
        skip = -1
        for end, parts, _ in self._begun:
            if skip < 0:  # the first frame may have arrived in part
                skip = received - (end - sum(map(len, parts)))
            for part in parts:
                if skip < len(part):
                    self._buffers.append(part[skip:])
                skip = max(0, skip - len(part))
        self._sent_bytes = received - len(preamble)

    def _begin_frames(self) -> None:
        batch_bytes, received = 0, self.received_bytes
        self.told_bytes = received
        while batch_bytes < _BATCH_BYTES and len(self._buffers) < _MAX_BUFFERS:
            if self._queue.heap:
                frame = self._queue.pop()
            elif self._turns:
                frame = self._turns.popleft()
            else:
                break
            payload = frame.begin() if frame.makes_payload else frame.payload
            payload_bytes = 0 if payload is None else size_of(payload)
            parts = [memoryview(pack_header(frame.header, payload_bytes, received))]
            if isinstance(payload, tuple):
                parts += [piece for piece in payload if piece]
            elif payload:
                parts.append(payload)
            self._buffers += parts
            frame_bytes = HEADER_BYTES + payload_bytes
            batch_bytes += frame_bytes
            self.begun_frames += 1
            self.begun_bytes += frame_bytes
            self._begun.append((self.begun_bytes, parts, frame if frame.tells_arrived else None))
            if frame.tells_sent:
                self._leaving.append((self.begun_bytes, frame))
