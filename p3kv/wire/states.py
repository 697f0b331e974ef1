"""State of an optimizer for a key on one server, as frames: an outline, then arrays' bytes.

Nothing waits for these frames, so they leave after all slices.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Deque, Dict, Mapping, NamedTuple, Optional

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.wire.fields import Header, RoundHeader, StateHeader
from p3kv.wire.framing import Frame, FrameWriter, urgency
from p3kv.wire.header import LAST_ROUND, MAX_STATE_BYTES, Kind
from p3kv.wire.messages import MAX_KEY_ELEMS, StateOutline, encode

STATE_URGENCY = urgency(LAST_ROUND, -(2**31))
"""Behind every slice."""
MEAN, LACKING = "mean", "lacking"
"""In the answer to a question for a mean gradient: its elements, which are left out where no worker
had a gradient, and the tensors of a bucket of which none had, a bit for each."""


class PlainState(NamedTuple):
    """An optimizer's state of a key on one server."""

    elements: Mapping[str, np.ndarray]
    """By names of the optimizer's own."""
    numbers: Mapping[str, Any]
    """Values that are the same for all elements, as plain values."""


def queue_state(
    writer: FrameWriter,
    rank: int,
    key_id: int,
    round: int,
    state: Optional[PlainState],
    whole: bool = False,
    member: int = 0,
) -> None:
    """Queues the frames of a state, or of there being none; its arrays must stay as they are.

    `whole`: it is a whole tensor's. `member` as in `StateHeader`.
    """
    elements = {} if state is None else state.elements
    outline = StateOutline(
        None if state is None else dict(state.numbers),
        [(name, array.dtype.name, list(array.shape)) for name, array in elements.items()],
    )
    flags = StateHeader.WHOLE_TENSOR if whole else 0
    announced = StateHeader(Kind.STATE, rank, flags, key=key_id, round=round, member=member)
    writer.push(Frame(STATE_URGENCY, announced, memoryview(encode(outline))))
    following = RoundHeader(Kind.STATE_BYTES, rank, key=key_id, round=round)
    for array in elements.values():
        memory = _bytes(array)
        for start in range(0, len(memory), MAX_STATE_BYTES):
            part = memory[start : start + MAX_STATE_BYTES]
            writer.push(Frame(STATE_URGENCY, following, part))


class ArrivingState:
    """A state whose outline has arrived, and the memory for the bytes that follow."""

    def __init__(
        self, outline: StateOutline, kept_elems: int, whole: bool, member: int = 0
    ) -> None:
        """`kept_elems`: how many elements the server keeps of the key. `member` as in
        `StateHeader`.

        Raises ProtocolError for a larger array. Those of a whole tensor may have any size.
        """
        self.whole = whole
        self.member = member
        most_elems = MAX_KEY_ELEMS if whole else kept_elems
        self._numbers = outline.numbers
        self._elements: Dict[str, np.ndarray] = {}
        self._missing: Deque[memoryview] = deque()
        for name, dtype, shape in outline.arrays:
            if math.prod(shape) > most_elems:
                raise ProtocolError(
                    f"it sent an optimizer's state with an array of shape {shape}; at most "
                    f"{most_elems} elements are right"
                )
            array = self._elements[name] = np.empty(shape, dtype)
            if array.size:
                self._missing.append(_bytes(array))

    @property
    def complete(self) -> bool:
        """Whether all bytes have a landing; they are there when the last frame has arrived."""
        return not self._missing

    @property
    def state(self) -> Optional[PlainState]:
        """The state, once it is complete; None if the optimizer remembers nothing."""
        return None if self._numbers is None else PlainState(self._elements, self._numbers)

    def land(self, header: Header) -> memoryview:
        """Where the next frame's payload goes; ProtocolError for one that can't be right."""
        count = header.payload_bytes
        if not self._missing or not 0 < count <= len(self._missing[0]):
            raise ProtocolError(
                f"it sent {count} bytes of an optimizer's state, which are too many"
            )
        memory = self._missing.popleft()
        if count < len(memory):
            self._missing.appendleft(memory[count:])
        return memory[:count]


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
