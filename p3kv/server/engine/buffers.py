"""Memory for slices, which is reused and not returned to the operating system."""

from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np


class Buffer:
    """The elements of one slice, and whether a frame still needs them.

    A buffer goes back to its pool when it is retired and no frame is being sent from it.
    """

    __slots__ = ("_pool", "array", "bytes", "is_retired", "kind", "sends")

    def __init__(self, pool: BufferPool, length: int, dtype: np.dtype) -> None:
        self._pool = pool
        self.kind = (length, dtype)
        self.array = np.empty(length, dtype)
        self.bytes = self.array.view(np.uint8).data
        self.is_retired = False
        self.sends = 0
        """How many frames still need the elements as they are."""

    def begin_send(self) -> None:
        """Keeps the elements until `end_send`."""
        self.sends += 1

    def end_send(self) -> None:
        """Undoes one `begin_send`."""
        self.sends -= 1
        if self.is_retired and not self.sends:
            self._pool.put(self)

    def retire(self) -> None:
        """Says that only frames being sent need the elements."""
        self.is_retired = True
        if not self.sends:
            self._pool.put(self)


class BufferPool:
    """Buffers by length and dtype. Belongs to one thread."""

    def __init__(self) -> None:
        self._free: Dict[Tuple[int, np.dtype], List[Buffer]] = {}

    def get(self, length: int, dtype: np.dtype) -> Buffer:
        """A buffer of `length` elements, not initialised."""
        free = self._free.get((length, dtype))
        if free:
            buffer = free.pop()
            buffer.is_retired = False
            return buffer
        return Buffer(self, length, dtype)

    def cast(self, buffer: Buffer, dtype: np.dtype) -> Buffer:
        """The elements in another buffer, and of another dtype perhaps; the first is retired."""
        copy = self.get(len(buffer.array), dtype)
        with np.errstate(over="ignore"):
            copy.array[:] = buffer.array
        buffer.retire()
        return copy

    def clear(self) -> None:
        """Returns unused buffers to the operating system."""
        self._free.clear()

    def put(self, buffer: Buffer) -> None:
        """Takes back a buffer that nobody uses."""
        self._free.setdefault(buffer.kind, []).append(buffer)
