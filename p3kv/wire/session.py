"""Messages between a node and the scheduler, over one connection after the other."""

from __future__ import annotations

import struct
from collections import deque
from typing import Deque, List, Tuple, Union

from p3kv.errors import ProtocolError

RETURN_S = 3.0
"""How long a node and the scheduler wait for each other when their connection has ended. A process
that lives connects again at once; one that has ended never does, and nothing else tells them
apart."""

_NUMBERS = struct.Struct("<QQ")
"""A message's number, and that of the last message that its sender has received."""


class Session:
    """One end: numbers messages, and keeps them until the other end has received them.

    So each message arrives once and in order, whatever connections lose.
    """

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
