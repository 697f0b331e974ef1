"""Memory for slices, which is reused and not returned to the operating system."""

from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np


class Buffer:
    """The elements of one slice, and whether a frame still needs them.

    A buffer goes back to its pool when it is retired and no frame is being sent from it.
    """

    __slots__ = ("_pool", "_retired", "_sends", "array", "bytes", "kind")

    def __init__(self, pool: BufferPool, length: int, dtype: np.dtype) -> None:
        self._pool = pool
        self.kind = (length, dtype.str)
        self.array = np.empty(length, dtype)
        self.bytes = self.array.view(np.uint8).data
        self._retired = False
        self._sends = 0

    @property
    def sending(self) -> bool:
        """Whether a frame still needs the elements as they are."""
        return self._sends > 0

    def begin_send(self) -> None:
        """Keeps the elements until `end_send`."""
        self._sends += 1

    def end_send(self) -> None:
        """Undoes one `begin_send`."""
        self._sends -= 1
        self._recycle()

    def retire(self) -> None:
        """Says that only frames being sent need the elements."""
        self._retired = True
        self._recycle()

    def reuse(self) -> None:
        """Takes a recycled buffer into use again."""
        self._retired = False

    def _recycle(self) -> None:
        if self._retired and self._sends == 0:
            self._pool.put(self)


class BufferPool:
    """Buffers by length and dtype. Belongs to one thread."""

    def __init__(self) -> None:
        self._free: Dict[Tuple[int, str], List[Buffer]] = {}

    def get(self, length: int, dtype: np.dtype) -> Buffer:
        """A buffer of `length` elements, not initialised."""
        free = self._free.get((length, dtype.str))
        if free:
            buffer = free.pop()
            buffer.reuse()
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
