"""How long a worker's steps take, and for how long a step waits for the network."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from typing import Callable, Deque, Dict, List, Optional, Tuple

import numpy as np

from p3kv.worker.transfers import Transfer, WorkerKey

_RECENT = 31
"""Medians are of so many steps."""
_SPREAD = 0.1
"""If gradients become ready within this part of a step's gap, all were ready when they were pushed,
and their times tell nothing of the backward pass."""

_FORWARD = 0.5
"""How long a forward pass takes, by the backward pass, where nothing else is known of it."""
_MOSTLY_KNOWN = 1.5
"""A layer counts if the backward time from it on, as far as that is measured, is so many times what
is guessed for the layer whose gradient comes first."""

now_s = time.monotonic


class LayerTime:
    """A key that a step pushes, and how long its passes take, in seconds."""

    __slots__ = ("backward_s", "forward_s", "key")

    def __init__(self, key: WorkerKey, forward_s: float, backward_s: float) -> None:
        self.key = key
        self.forward_s = forward_s
        self.backward_s = backward_s


class StepTimes:
    """Measures steps by what the worker's thread sees: gradients get ready, and values arrive.

    A step begins when its first gradient is ready; so its time is that from one backward pass to
    the next. The gap between the last gradient of a step and the first one of the next is the
    forward pass, and whatever the forward pass has waited for. Nothing tells these two apart
    directly. But a forward pass can't reach a layer before the layer's value has arrived; it takes
    about the same part of the backward pass in each layer, and less than the backward pass. So each
    gap has a longest forward pass that its arrivals allow. Where that is no bound, because the
    forward pass has waited for one layer after the other, it is taken for half as long as the
    backward pass, which computes two products of matrices for each of its own. The lower quartile
    of the last gaps is taken: what disturbs a gap makes it longer. What a gap has more is waiting,
    as far as values were still missing then: a gap in which the script validates, or reads data
    slowly, does not count as waiting for the network.

    Other processors of the host disturb these times; so do scripts that wait for all gradients
    before they push. Then layers are taken for equal. Belongs to the worker's thread; any thread
    may read the numbers.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[int], None] = lambda steps: None
        """Called when a step has ended, with their number."""
        self.steps = 0
        """Steps that have ended; all times are theirs."""
        self.step_s = 0.0
        self.waiting_s = 0.0
        self.forward_s = 0.0
        self.backward_s = 0.0
        """Of one step, as estimated from the last ones, without waiting."""
        self.waited_for: Optional[WorkerKey] = None
        """The key for which the most forward passes have waited longest."""
        self._waits: Counter[WorkerKey] = Counter()
        self._step = 0
        self._keys: List[WorkerKey] = []
        self._ready_s: List[float] = []
        self._arrived_s: Dict[WorkerKey, float] = {}
        self._forwards_s: Deque[float] = deque(maxlen=_RECENT)
        self._backwards_s: Deque[float] = deque(maxlen=_RECENT)
        self._layers: Optional[Tuple[List[WorkerKey], np.ndarray]] = None

    def gradient_ready(self, transfer: Transfer) -> None:
        """Takes note of a transfer with a gradient, which was ready when it was made."""
        if transfer.step > self._step:
            if self._step:
                self._end_step(transfer.ready_s)
            self._step = transfer.step
            self._keys, self._ready_s, self._arrived_s = [], [], {}
        self._keys.append(transfer.key)
        self._ready_s.append(transfer.ready_s)

    def value_arrived(self, key: WorkerKey) -> None:
        """Takes note that all of a key's new value is here."""
        self._arrived_s[key] = now_s()

    def layers(self) -> List[LayerTime]:
        """The keys of the last step in forward order, as far as the order in which their gradients
        become ready tells it, with the times of the layers: parts of the passes' times, as the last
        step tells in which gradients became ready one by one. Empty before the second step."""
        if self._layers is None:
            return []
        keys, ready_s = self._layers
        took_s = np.diff(ready_s)[::-1]
        took_s = np.append(took_s, took_s.mean() if len(took_s) else 0.0)
        total_s = took_s.sum()
        parts = took_s / total_s if total_s else np.full(len(keys), 1 / len(keys))
        return [
            LayerTime(key, part * self.forward_s, part * self.backward_s)
            for key, part in zip(reversed(keys), parts.tolist())
        ]

    def _end_step(self, next_s: float) -> None:
        """Measures the step whose gradients are in, when the next one's first gradient is ready."""
        keys, ready_s = self._keys, np.maximum.accumulate(self._ready_s)
        first_s, last_s = float(ready_s[0]), float(ready_s[-1])
        backward_s = (last_s - first_s) * len(keys) / max(1, len(keys) - 1)
        # The layer whose gradient comes first shows no backward time: it is taken for average.
        first_layer_s = backward_s / len(keys)
        gap_s = max(0.0, next_s - last_s - first_layer_s)
        # From a layer on, the forward pass has the layers that the backward pass had before it.
        known_s = ready_s - first_s
        left_s = np.where(known_s < _MOSTLY_KNOWN * first_layer_s, 0.0, known_s + first_layer_s)
        left_s[-1] = backward_s
        spread = backward_s > _SPREAD * gap_s
        if not spread:
            left_s = np.arange(1, len(keys) + 1) / len(keys)
        arrived = [self._arrived_s.get(key, 0.0) for key in keys]
        usable_s = np.clip(arrived, last_s, last_s + gap_s)
        most_s = np.full(len(keys), np.inf)
        np.divide((last_s + gap_s - usable_s) * left_s[-1], left_s, out=most_s, where=left_s > 0)
        binding = int(np.argmin(most_s))
        most_forward_s = float(most_s[binding])
        if spread and most_forward_s >= backward_s:
            most_forward_s = _FORWARD * backward_s
        self._forwards_s.append(most_forward_s)
        self._backwards_s.append(backward_s)
        self.forward_s = _low(self._forwards_s)
        self.backward_s = statistics.median(self._backwards_s)
        missing_s = float(usable_s.max()) - last_s
        waiting_s = min(max(0.0, gap_s - self.forward_s), missing_s)
        if waiting_s > 0:
            self._waits[keys[binding]] += 1
            if self._waits[keys[binding]] >= self._waits[self.waited_for or keys[binding]]:
                self.waited_for = keys[binding]
        if spread:
            self._layers = keys, ready_s
        elif self._layers is None:
            self._layers = keys, np.full(len(keys), first_s)
        self.waiting_s += waiting_s
        self.step_s += next_s - first_s
        self.steps += 1
        self.on_step(self.steps)


def _low(seconds: Deque[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[(len(seconds) - 1) // 4]
