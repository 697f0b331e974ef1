"""The order in which the forward pass needs the parameters, and how a store learns it.

There are two ways. First, the front end may note in which order the forward pass reads parameters.
Second, if it can't, gradients become ready in the reverse of the forward order. If the script waits
for all gradients before it pushes, they are all ready at once, and their order says nothing.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, Iterable, List

from p3kv.wire.messages import Key

_log = logging.getLogger(__name__)

_AFAR = 8
"""A distance in the order of the pushes. The engine's threads start operations that are closer than
this in any order, and of others only the few that a thread has just delayed."""
_LEAST_OVERTAKEN = 1 / 3
"""Part of all gradients that must be overtaken: more than up to eight threads of the engine delay
if all gradients were ready."""


class ForwardReads(ABC):
    """Notes a front end takes of the first forward passes, perhaps before there is a store."""

    @abstractmethod
    def stop(self) -> None:
        """Notes nothing more; may be called twice. What was noted stays, for stores created
        later."""

    @abstractmethod
    def order(self, keys_by_array: Dict[int, Key]) -> List[Key]:
        """Keys in the order in which the forward pass has read them first; empty if nothing was
        noted.

        `keys_by_array` gives the key for the `id` of each array with which the store was
        initialised.
        """


class ReadyOrder:
    """The order in which the gradients of the first round become ready."""

    def __init__(self) -> None:
        self._push_places: Dict[Key, int] = {}
        self._ready: Dict[Key, None] = {}
        self.pushing = True
        """Whether the first round goes on."""

    def note_push(self, key: Key) -> None:
        """Takes note of a key's first push."""
        if self.pushing:
            self._push_places.setdefault(key, len(self._push_places))

    def note_ready(self, key: Key) -> None:
        """Takes note that a pushed gradient is ready."""
        if key in self._push_places:
            self._ready.setdefault(key)

    def end_pushing(self) -> None:
        """Says that the first round has no further keys."""
        self.pushing = False

    def complete(self, num_keys: int) -> bool:
        """Whether all gradients of the round are ready, of at most `num_keys` keys."""
        no_more = not self.pushing or len(self._push_places) == num_keys
        return no_more and len(self._ready) == len(self._push_places)

    def forward_order(self) -> List[Key]:
        """The reverse of the order of becoming ready; empty if that tells nothing.

        Gradients that were ready when they were pushed start in the order of the pushes, since the
        engine keeps it. If backward still computes them, gradients that were pushed much later
        overtake many of them, unless the script pushes in the order of backward. Then the order of
        becoming ready says nothing.
        """
        afar = min(_AFAR, len(self._push_places) / 2)
        overtaken, newest = 0, -1
        for key in self._ready:
            place = self._push_places[key]
            overtaken += newest - place >= afar
            newest = max(newest, place)
        if overtaken < _LEAST_OVERTAKEN * len(self._push_places):
            return []
        return list(self._ready)[::-1]


class OrderLearner:
    """Learns the forward order in the first round and publishes it, once.

    `publish(order)` gets all declared keys; keys that were not learned come last. It is called
    before the first slice of the first step, or when the last gradient of that step is about to
    leave. `note_ready` may be called from any thread, all else belongs to the store's thread.
    """

    def __init__(self, publish: Callable[[List[Key]], None], reads: ForwardReads) -> None:
        self._publish = publish
        self._reads = reads
        self._lock = threading.Lock()
        self._learning = True
        self._declared: Dict[Key, None] = {}
        self._keys_by_array: Dict[int, Key] = {}
        self._arrays: List[Any] = []
        self._ready_order = ReadyOrder()

    def stop(self) -> None:
        """Stops learning; may be called twice."""
        self._learning = False
        self._keys_by_array.clear()
        self._arrays.clear()

    def note_key(self, key: Key, arrays: Iterable[Any]) -> None:
        """Takes note of a key and the arrays that hold its value on this worker."""
        with self._lock:
            if self._learning:
                self._declared[key] = None
                for array in arrays:
                    self._keys_by_array[id(array)] = key
                    self._arrays.append(array)  # no other object gets its id while it is kept

    def begin_step(self, step: int) -> None:
        """Says that a step of the store begins, before its first push; the first one is 1."""
        if step == 2:
            # Not in the first step: another store may not have begun its own.
            self._reads.stop()
        with self._lock:
            if not self._learning:
                return
            if step == 1:
                self._learned(self._reads.order(self._keys_by_array))
            else:
                self._ready_order.end_pushing()
                self._look()

    def note_push(self, key: Key) -> None:
        """Takes note that a key is pushed, before its gradient is ready."""
        if not self._learning:  # never again: each push asks, and needs no lock for this answer
            return
        with self._lock:
            if self._learning:
                self._ready_order.note_push(key)

    def note_ready(self, key: Key) -> None:
        """Takes note that a pushed gradient is ready, before it leaves."""
        if not self._learning:
            return
        with self._lock:
            if self._learning:
                self._ready_order.note_ready(key)
                self._look()

    def _look(self) -> None:
        if self._ready_order.complete(len(self._declared)):
            self._learned(self._ready_order.forward_order())
            if self._learning and not self._ready_order.pushing:
                self.stop()
                _log.info("nothing tells the forward order: the priorities of the calls hold")

    def _learned(self, order: List[Key]) -> None:
        if order:
            self.stop()
            # A dict keeps the first place of each key: those not learned come last.
            self._publish(list(dict.fromkeys([*order, *self._declared])))
