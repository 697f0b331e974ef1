"""Gradients leave by urgency, or in turn until the backward pass is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Dict, List, cast

from p3kv.wire.connection import Connection
from p3kv.wire.fields import Header
from p3kv.wire.framing import FrameWriter
from p3kv.wire.header import Kind
from p3kv.wire.loop import Loop, Pacing
from p3kv.worker.egress import Egress
from tests.handling import Told

PASS_BYTES = 1000
BACKWARD = (1, 2, 3, 4)
"""Urgencies of gradients, in the order in which they become ready: the last layer's first."""


class Sent:
    """A worker's gradients for one server, and the order in which they leave."""

    def __init__(self, pays: bool) -> None:
        self.writer = FrameWriter()
        servers = cast(Dict[int, Connection], {0: SimpleNamespace(writer=self.writer)})
        self.egress = Egress(0, servers, [], cast(Loop, SimpleNamespace(pacing=Pacing())))
        self.egress.turns_pay = pays
        self.egress.begin(0, PASS_BYTES)
        self._step, self._begun_bytes = 1, 0
        self._left: List[int] = []

    def ready(self, urgency: int, last: bool = False, in_turn: bool = True) -> None:
        size_bytes = PASS_BYTES - self._begun_bytes if last else 1
        self.egress.begin(self._step, size_bytes)
        self._begun_bytes += size_bytes
        if last:
            self._step, self._begun_bytes = self._step + 1, 0
        self.writer.push(Told(
            urgency, Header(Kind.ACK, 0), in_turn=in_turn,
            sent=lambda: self._left.append(urgency),
        ))  # fmt: skip

    def left(self) -> List[int]:
        while self.writer:
            self.writer.sent(sum(map(len, self.writer.buffers())))
        left, self._left = self._left, []
        return left


def test_the_most_urgent_leaves_first_where_turns_do_not_pay() -> None:
    sent = Sent(pays=False)
    for urgency in BACKWARD:
        sent.ready(urgency)
    assert (len(sent.writer), sent.writer.top_priority()) == (4, 4)
    assert sent.left() == [4, 3, 2, 1]


def test_gradients_leave_as_they_become_ready_and_behind_all_else() -> None:
    sent = Sent(pays=True)
    for urgency in BACKWARD:
        sent.ready(urgency)
    assert (len(sent.writer), sent.writer.waiting_priority()) == (4, None)
    assert sent.writer.top_priority() < -(2**62)
    sent.ready(-7, in_turn=False)
    assert sent.writer.waiting_priority() == -7
    assert sent.left() == [-7, 1, 2, 3, 4]


def test_what_is_left_when_the_pass_is_over_goes_by_urgency_in_every_step() -> None:
    sent = Sent(pays=True)
    for _ in range(2):
        for urgency in BACKWARD[:2]:
            sent.ready(urgency)
        assert sent.left() == [1, 2]
        sent.ready(1)
        sent.ready(3)
        sent.ready(4, last=True)
        assert sent.left() == [4, 3, 1]
    sent.ready(1)
    sent.ready(2)
    sent.egress.turns_pay = False
    sent.ready(3)
    assert sent.left() == [3, 2, 1]
