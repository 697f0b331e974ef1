"""Frames to bytes and back, without any socket: whatever the network does to the cuts."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.errors import ProtocolError
from p3kv.transport import Link
from p3kv.wire.connection import Connection, Handler, Landing
from p3kv.wire.fields import Header, PushHeader
from p3kv.wire.framing import Frame, FrameReader, FrameWriter
from p3kv.wire.header import HEADER_BYTES, Kind, pack_header, unpack_header
from p3kv.wire.protocol import Conversation, Phase, Rule
from tests.handling import Told

BATCH_BYTES = 16 * 1024
"""Small frames go together up to about this size: the most that an urgent frame waits for,
beside one whole slice."""

# Nothing, next to nothing, around the read-ahead, and more than fits it at once.
payload_sizes = st.one_of(
    st.integers(0, 100), st.sampled_from([16_384 - HEADER_BYTES, 16_384, 16_385, 40_000])
)
priorities = st.integers(-3, 3)
frames = st.lists(st.tuples(priorities, payload_sizes), max_size=12)
cuts = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 50_000)), min_size=1, max_size=30)


def frame(number: int, priority: int, payload_bytes: int) -> Tuple[Header, Optional[memoryview]]:
    """A frame that says its number, with a payload that no other frame has."""
    header = PushHeader(Kind.PUSH, 0, key=number, priority=priority)
    if not payload_bytes:
        return header, None
    elements = np.random.RandomState(number).randint(0, 256, payload_bytes).astype(np.uint8)
    return header, memoryview(elements)


def sent(header: Header, payload: Optional[memoryview]) -> bytes:
    """A frame as it travels."""
    words = payload or b""
    return pack_header(header, len(words), received=0) + words


class Stream:
    """What a writer sends, taken in pieces of any size, as a socket with little room does."""

    def __init__(self, writer: FrameWriter) -> None:
        self.data = bytearray()
        self._writer = writer

    def take(self, count: int) -> None:
        taken = b"".join(self._writer.buffers())[:count]
        self.data += taken
        self._writer.sent(len(taken))

    def take_all(self, sizes: Iterator[int]) -> None:
        while self._writer:
            self.take(next(sizes))


class Given(Link):
    """A link that has what a test gives it."""

    descriptor = -1

    def __init__(self) -> None:
        self.given = b""

    def receive_into(self, buffers: List[memoryview]) -> int:
        count = 0
        for buffer in buffers:
            piece = self.given[count : count + len(buffer)]
            buffer[: len(piece)] = piece
            count += len(piece)
        assert count, "a reader that has room for nothing would wait for ever"
        self.given = self.given[count:]
        return count

    def send(self, buffers: Sequence[memoryview]) -> int:
        raise AssertionError("nothing is sent")

    def hold_at_most(self, size_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class Sink(Handler):
    """Reads frames into memory of their own each, and notes what happened in which order."""

    def __init__(self, bad: int = -1) -> None:
        """`bad`: the number of a frame that must not come."""
        self.places: dict = {}
        self.events: List[Tuple[str, int]] = []
        self.frames: List[Tuple[Header, Optional[memoryview]]] = []
        self.landings = {Kind.PUSH: self._land}
        self.arrivals = {Kind.PUSH: self._take}
        self._bad = bad
        self._link = Given()
        conversation = Conversation({Phase.NEW: {Kind.PUSH: Rule(1 << 20)}}, "worker")
        self._connection = Connection(self._link, conversation, self, 1 << 20)

    @property
    def reader(self) -> FrameReader:
        return self._connection._reader

    def lost(self, connection: Connection, reason: str) -> None:
        raise ProtocolError(reason)

    def _land(self, connection: Connection, header: Header) -> Landing:
        if header.key == self._bad:
            raise ProtocolError("this frame must not come")
        self.events.append(("begun", header.key))
        if not header.payload_bytes:
            return None, None
        array = np.zeros(header.payload_bytes, np.uint8)
        self.places[header.key] = array
        memory = memoryview(array)
        return memory, memory

    def _take(self, connection: Connection, header: Header, payload: Optional[memoryview]) -> None:
        self.events.append(("arrived", header.key))
        self.frames.append((header, payload))

    def receive(self, data: bytes, sizes: Iterator[int]) -> None:
        start = 0
        while start < len(data):
            count = self.receive_some(data[start : start + next(sizes)])
            start += count

    def receive_some(self, data: bytes) -> int:
        """Lets as many bytes arrive as there is room for; returns how many."""
        self._link.given = data
        if data:
            self._connection.receive()
        return len(data) - len(self._link.given)


def forever(sizes: List[int]) -> Iterator[int]:
    while True:
        yield from sizes


@given(frames, cuts, cuts)
@settings(max_examples=200)
def test_frames_arrive_whole_and_in_place_however_the_bytes_are_cut(
    described: list, sending: list, receiving: list
) -> None:
    writer, sink = FrameWriter(), Sink()
    stream = Stream(writer)
    payloads = {}
    for number, (priority, payload_bytes) in enumerate(described):
        header, payloads[number] = frame(number, priority, payload_bytes)
        writer.push(Frame(priority, header, payloads[number]))
    stream.take_all(forever(sending))
    sink.receive(bytes(stream.data), forever(receiving))

    expected = sorted(range(len(described)), key=lambda n: (-described[n][0], n))
    assert [header.key for header, _ in sink.frames] == expected
    for header, payload in sink.frames:
        sent = payloads[header.key]
        if sent is None:
            assert payload is None
        else:
            assert payload is not None
            assert payload == sent
            # The very memory that was asked for, not a copy of it.
            assert np.shares_memory(np.asarray(payload), sink.places[header.key])


@given(frames, cuts)
def test_a_frame_arrives_before_the_next_begins(described: list, receiving: list) -> None:
    sink = Sink()
    data = b""
    for number, (priority, payload_bytes) in enumerate(described):
        data += sent(*frame(number, priority, payload_bytes))
    sink.receive(data, forever(receiving))
    assert sink.events == [
        (event, number) for number in range(len(described)) for event in ("begun", "arrived")
    ]


def test_a_large_payload_is_received_straight_into_its_place() -> None:
    sink = Sink()
    header, payload = frame(0, 0, 40_000)
    sink.receive_some(pack_header(header, 40_000, received=0))
    first = sink.reader.buffers()[0]
    assert len(first) == 40_000
    assert np.shares_memory(np.asarray(first), sink.places[0])
    sink.receive_some(bytes(payload or b"")[:10_000])
    assert len(sink.reader.buffers()[0]) == 30_000


def test_there_is_always_room_beyond_the_payload_for_the_next_header() -> None:
    sink = Sink()
    sink.receive_some(sent(*frame(0, 0, 40_000))[:HEADER_BYTES])
    assert sum(len(buffer) for buffer in sink.reader.buffers()[1:]) >= HEADER_BYTES


@given(frames.filter(bool), cuts, st.data())
def test_what_land_raises_comes_out_after_the_frames_before_it(
    described: list, receiving: list, data: Any
) -> None:
    bad = data.draw(st.integers(0, len(described) - 1))

    sink = Sink(bad)
    stream = b"".join(sent(*frame(n, *described[n])) for n in range(len(described)))
    with pytest.raises(ProtocolError, match="must not come"):
        sink.receive(stream, forever(receiving))
    assert [header.key for header, _ in sink.frames] == list(range(bad))


class Model:
    """Which frames wait and which have begun, kept beside a writer."""

    def __init__(self) -> None:
        self.writer = FrameWriter()
        self.stream = Stream(self.writer)
        self.waiting: List[Tuple[int, int]] = []
        self.begun: List[int] = []
        self.sizes: List[int] = []
        self.sent_calls: dict = {}

    def push(self, priority: int, payload_bytes: int) -> None:
        number = len(self.sizes)
        header, payload = frame(number, priority, payload_bytes)
        self.sizes.append(HEADER_BYTES + payload_bytes)
        self.waiting.append((priority, number))
        self.writer.push(Told(priority, header, payload, sent=self._on_sent(number)))

    def _on_sent(self, number: int) -> Callable[[], None]:
        def on_sent() -> None:
            assert number not in self.sent_calls, "called twice"
            self.sent_calls[number] = len(self.stream.data)

        return on_sent

    def take(self, count: int) -> None:
        if not self.end_of_begun() > len(self.stream.data):
            self.begin()
        self.stream.take(count)
        for number, end in zip(self.begun, self.ends()):
            assert (number in self.sent_calls) == (end <= len(self.stream.data))

    def begin(self) -> None:
        """The writer has nothing begun: it must begin with the most urgent frames, in order."""
        before = len(self.begun)
        bytes_ahead = 0
        for buffer in self.writer.buffers():
            if len(buffer) == HEADER_BYTES:
                header = unpack_header(memoryview(buffer), 0)
                if header.kind == Kind.PUSH and self.is_first(header):
                    assert bytes_ahead < BATCH_BYTES
                    self.waiting.remove((header.priority, header.key))
                    self.begun.append(header.key)
                    bytes_ahead += self.sizes[header.key]
        assert bytes_ahead == sum(len(buffer) for buffer in self.writer.buffers())
        if len(self.begun) > before and self.waiting:
            assert bytes_ahead >= BATCH_BYTES, "small frames that waited did not go together"

    def is_first(self, header: Header) -> bool:
        return bool(self.waiting) and (header.priority, header.key) == max(
            self.waiting, key=lambda entry: (entry[0], -entry[1])
        )

    def ends(self) -> List[int]:
        return list(np.cumsum([self.sizes[number] for number in self.begun]))

    def end_of_begun(self) -> int:
        return self.ends()[-1] if self.begun else 0


actions = st.lists(
    st.one_of(st.tuples(priorities, payload_sizes), st.integers(1, 30_000)), max_size=40
)


@given(actions)
@settings(max_examples=200)
def test_begun_frames_are_finished_and_the_most_urgent_of_the_rest_begins_next(
    actions: list,
) -> None:
    model = Model()
    for action in actions:
        if isinstance(action, tuple):
            model.push(*action)
        else:
            model.take(action)
    while model.writer:
        model.take(10_000)
    assert sorted(model.begun) == list(range(len(model.sizes)))
    assert sorted(model.sent_calls) == sorted(model.begun)

    sink = Sink()
    sink.receive(bytes(model.stream.data), forever([7_000]))
    assert [header.key for header, _ in sink.frames] == model.begun
    for header, payload in sink.frames:
        assert payload == frame(header.key, 0, header.payload_bytes)[1]


def test_small_frames_go_together() -> None:
    writer = FrameWriter()
    for number in range(50):
        writer.push(Frame(0, *frame(number, 0, 64)))
    assert sum(len(buffer) for buffer in writer.buffers()) == 50 * (64 + HEADER_BYTES)


def test_an_urgent_frame_overtakes_all_that_has_not_begun() -> None:
    writer = FrameWriter()
    for number in range(3):
        writer.push(Frame(0, *frame(number, 0, 40_000)))
    stream = Stream(writer)
    stream.take(1)
    writer.push(Frame(9, *frame(3, 9, 8)))
    stream.take_all(forever([1 << 20]))
    sink = Sink()
    sink.receive(bytes(stream.data), forever([1 << 20]))
    assert [header.key for header, _ in sink.frames] == [0, 3, 1, 2]


def test_a_writer_says_how_urgent_it_is_and_that_a_begun_frame_goes_before_all() -> None:
    writer = FrameWriter()
    assert not writer
    writer.push(Frame(-5, *frame(0, -5, 40_000)))
    writer.push(Frame(4, *frame(1, 4, 40_000)))
    assert writer
    assert writer.top_priority() == 4
    Stream(writer).take(1)
    assert writer.top_priority() > 2**31 - 1
    Stream(writer).take(1 << 20)
    assert writer.top_priority() == -5


def test_no_more_buffers_are_begun_than_one_system_call_takes() -> None:
    writer = FrameWriter()
    for number in range(2000):
        writer.push(Frame(0, *frame(number, 0, 1)))
    assert len(writer.buffers()) <= 1024  # IOV_MAX


def test_a_writer_with_nothing_to_send_gives_no_bytes() -> None:
    writer = FrameWriter()
    assert len(writer.buffers()) == 0
    assert not writer
