"""A priority queue, in which ties are first in, first out, and what slices are sorted by."""

from __future__ import annotations

import heapq
from typing import Generic, Iterator, List, Tuple, TypeVar

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Gives the item with the largest priority first; of a tie, the oldest item.

    Not thread-safe: a queue belongs to one event loop.
    """

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
