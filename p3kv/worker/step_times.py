"""How long a worker's steps take, and the parts of their time, which add up to it."""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from contextlib import suppress
from itertools import accumulate
from typing import Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from p3kv.wire.header import passed_s
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN
from p3kv.worker.transfers import Transfer, WorkerKey


class Parts(NamedTuple):
    """Seconds of one step, or of several. None is negative, and together they are the step."""

    computing_s: float = 0.0
    """Forward and backward passes."""
    script_s: float = 0.0
    """All gradients were ready, and the script had not begun the next forward pass: it read data,
    validated, or ran Python."""
    network_s: float = 0.0
    """The forward pass waited for values, and none of what follows was the reason."""
    server_s: float = 0.0
    """It waited, and the value's server worked."""
    straggler_s: float = 0.0
    """It waited, and another worker's gradient was not ready."""
    processor_s: float = 0.0
    """This process could go on, and no processor was free for it."""

    @property
    def waiting_s(self) -> float:
        """For how long it waited for values under way: on the network and at the servers."""
        return self.network_s + self.server_s

    def plus(self, other: Parts) -> Parts:
        """Adds the parts of both."""
        return Parts(*[one + more for one, more in zip(self, other)])


class Wait(NamedTuple):
    """From when to when a forward pass, or the script, waited for one value.

    `last_ready_s`: when the last worker's gradient for it was ready. `worked_s`: for how long its
    server has worked meanwhile.
    """

    begin_s: float
    end_s: float
    last_ready_s: float
    worked_s: float

    @property
    def seconds(self) -> float:
        """How long."""
        return max(0.0, self.end_s - self.begin_s)

    def parts(self) -> Parts:
        """Parts of the wait, by cause."""
        straggler_s = min(max(0.0, self.last_ready_s - self.begin_s), self.seconds)
        server_s = min(max(0.0, self.worked_s), self.seconds - straggler_s)
        network_s = self.seconds - straggler_s - server_s
        return Parts(network_s=network_s, server_s=server_s, straggler_s=straggler_s)


class Layer(NamedTuple):
    """A layer's value, in the order of the forward pass: when the pass comes to it if it waits for
    nothing, in seconds from its begin, and when the value arrived."""

    after_s: float
    arrived_s: float
    last_ready_s: float
    server: int
    """Rank of the server whose slice came last."""


Worked = Callable[[int, float, float], float]
"""For how long a server has worked between two times."""


def forward_waits(begin_s: float, layers: Sequence[Layer], worked: Worked) -> List[Wait]:
    """Where a forward pass has waited that began at `begin_s`."""
    waits, waited_s = [], 0.0
    for layer in layers:
        wanted_s = begin_s + layer.after_s + waited_s
        if layer.arrived_s > wanted_s:
            worked_s = worked(layer.server, wanted_s, layer.arrived_s)
            waits.append(Wait(wanted_s, layer.arrived_s, layer.last_ready_s, worked_s))
            waited_s += layer.arrived_s - wanted_s
    return waits


class Delayed(NamedTuple):
    """The shares of time in which threads could go on and had no processor: of those that compute
    the one that was delayed most, which may be the script's; the script's; and the one that sends
    and receives."""

    passes: float = 0.0
    script: float = 0.0
    exchange: float = 0.0


def parts_of_step(
    step_s: float,
    script_s: float,
    waits: Sequence[Wait],
    longest_s: float,
    delayed: Delayed = Delayed(),  # noqa: B008  a constant
) -> Parts:
    """Parts into which a step's time went. `waits` say for what there was waiting, for `longest_s`
    in all at most. What is nothing else is computing."""
    script_s = min(max(0.0, script_s), step_s)
    for_what = Parts()
    for wait in waits:
        for_what = for_what.plus(wait.parts())
    waited_s = sum(for_what)
    most_s = min(waited_s, max(0.0, longest_s), step_s - script_s)
    scale = most_s / waited_s if waited_s > 0 else 0.0
    network_s, server_s, straggler_s = (
        scale * seconds for seconds in (for_what.network_s, for_what.server_s, for_what.straggler_s)
    )
    computing_s = max(0.0, step_s - script_s - network_s - server_s - straggler_s)
    passes_s = min(computing_s, delayed.passes * step_s)
    # The script's thread was delayed in the passes or between them.
    between_s = min(script_s, max(0.0, delayed.script * step_s - passes_s))
    exchange_s = delayed.exchange * network_s
    return Parts(
        computing_s - passes_s, script_s - between_s, network_s - exchange_s, server_s,
        straggler_s, passes_s + between_s + exchange_s,
    )  # fmt: skip


_LOOK_EVERY_S = 0.25
"""A look reads a file for each thread: a millisecond where there are many."""
_TASKS = "/proc/self/task"

now_s = time.monotonic


class ProcessorDelay:
    """The shares of time in which threads of this process waited for a processor.

    The kernel counts for each thread how long it was ready to run and did not (`schedstat`). Of
    threads that compute together, all are delayed about as long as the one that is delayed most.
    """

    def __init__(self) -> None:
        """To be made in the script's thread."""
        self._script = str(threading.get_native_id())
        self._looked_s = now_s()
        self._delays_ns = _delays_ns()
        self._found = Delayed()

    def delayed(self) -> Delayed:
        """Shares of delay since the last look, which is a quarter of a second ago at least; to be
        called from the thread that sends and receives."""
        now = now_s()
        elapsed_s = now - self._looked_s
        if elapsed_s >= _LOOK_EVERY_S:
            before_ns, self._delays_ns, self._looked_s = self._delays_ns, _delays_ns(), now
            shares = {
                thread: min(1.0, max(0.0, delay_ns - before_ns.get(thread, 0)) / 1e9 / elapsed_s)
                for thread, delay_ns in self._delays_ns.items()
            }
            exchange = shares.pop(str(threading.get_native_id()), 0.0)
            passes: List[float] = list(shares.values())
            self._found = Delayed(max(passes, default=0.0), shares.get(self._script, 0.0), exchange)
        return self._found


def _delays_ns() -> Dict[str, int]:
    """By thread; none where the kernel does not count."""
    delays: Dict[str, int] = {}
    with suppress(OSError):
        for thread in os.listdir(_TASKS):
            with suppress(OSError), open(f"{_TASKS}/{thread}/schedstat") as file:
                delays[thread] = int(file.read().split()[1])
    return delays


class ServerWork:
    """Each server's work until now, as it was when its values arrived. Belongs to the worker's
    thread."""

    def __init__(self) -> None:
        self._at_s: Dict[int, List[float]] = {}
        self._worked_s: Dict[int, List[float]] = {}
        """By server, what its values have said, and when; numbers only grow."""
        self._last_us: Dict[int, int] = {}

    def note(self, server: int, at_s: float, worked_us: int) -> None:
        """Takes note of what a value says that has arrived at `at_s`: its server had worked for so
        long. Values that overtake each other say less than what is known."""
        before_us = self._last_us.setdefault(server, worked_us)
        worked_s = self._worked_s.setdefault(server, [])
        more_s = max(0.0, passed_s(before_us, worked_us))
        if more_s:
            self._last_us[server] = worked_us
        worked_s.append(more_s + (worked_s[-1] if worked_s else 0.0))
        self._at_s.setdefault(server, []).append(at_s)

    def between(self, server: int, begin_s: float, end_s: float) -> float:
        """For how long a server has worked between two times, taken as even between two values."""
        if server not in self._at_s:
            return 0.0
        before, after = np.interp([begin_s, end_s], self._at_s[server], self._worked_s[server])
        return float(after - before)

    def total_s(self, server: int) -> float:
        """For how long a server has worked since its first value; from any thread."""
        worked_s = self._worked_s.get(server)
        return worked_s[-1] if worked_s else 0.0

    def forget(self, before_s: float) -> None:
        """Forgets what nobody asks for who asks for times after `before_s`."""
        for server, at_s in self._at_s.items():
            old = max(0, bisect_right(at_s, before_s) - 1)
            del at_s[:old], self._worked_s[server][:old]


class _LateValue(NamedTuple):
    """A value that came after the step from which on the worker was to go on with it."""

    begin_s: float
    end_s: float
    last_ready_s: float
    """When the last worker's difference was ready."""
    server: int
    """Rank of the server whose slice came last."""


class LocalStepTimes:
    """Measures the steps of workers that train by themselves, from one update of the weights to the
    next. A step waits while the script waits for arrays, as far as a value is late; all else is
    computing. Belongs to the worker's thread.
    """

    def __init__(self, script: ScriptTimes, work: ServerWork) -> None:
        self._script = script
        self._work = work
        self._begun_s: Optional[float] = None
        self._late: List[_LateValue] = []

    def value_arrived(self, transfer: Transfer, at_s: float, late_s: float, server: int) -> None:
        """Takes note of a value; the rest is as in `StepTimes.value_arrived`."""
        since_s = transfer.awaited_since_s
        if since_s is not None:
            self._late.append(_LateValue(since_s, at_s, transfer.ready_s + late_s, server))

    def begin_step(self, at_s: float) -> Optional[Tuple[float, List[Wait]]]:
        """The script has updated its weights: the next step begins. Return the seconds of the one
        that has ended, and its waits; None before the first."""
        begun_s, self._begun_s = self._begun_s, at_s
        late, self._late = sorted(self._late), []
        blocked = self._script.take_blocked()
        if begun_s is None:
            return None
        waits = [wait for begin_s, end_s in blocked for wait in self._waits(begin_s, end_s, late)]
        return at_s - begun_s, waits

    def _waits(self, begin_s: float, end_s: float, late: List[_LateValue]) -> Iterator[Wait]:
        """What the script waited for from then to then; each moment counts once."""
        for one in late:
            begin_s = max(begin_s, one.begin_s)
            until_s = min(one.end_s, end_s)
            if begin_s < until_s:
                worked_s = self._work.between(one.server, begin_s, until_s)
                yield Wait(begin_s, until_s, one.last_ready_s, worked_s)
                begin_s = until_s


_SHORT_WAIT_S = 0.0001
"""Whoever waits for less finds what it reads."""


class Between(NamedTuple):
    """Times of the script after a step's last push and before the next step's first one."""

    forward_s: float
    """When it began the forward pass; 0 if that is not known."""
    blocked: List[Tuple[float, float]]
    """From when to when it waited for arrays."""


class ScriptTimes:
    """Keeps what the script does after each step. Its thread writes, and the worker's takes."""

    def __init__(self) -> None:
        self._forwards_s: Dict[int, float] = {}
        self._blocked: Dict[int, List[Tuple[float, float]]] = {}

    def forward_begins(self, step: int, at_s: float) -> bool:
        """Takes note of a forward pass of training after a step, if it is the first one; returns
        whether it is."""
        return self._forwards_s.setdefault(step, at_s) == at_s

    def blocked(self, step: int, begin_s: float, end_s: float) -> None:
        """Takes note that the script waited for arrays."""
        if end_s - begin_s > _SHORT_WAIT_S:
            self._blocked.setdefault(step, []).append((begin_s, end_s))

    def take_blocked(self) -> List[Tuple[float, float]]:
        """Takes all waits for arrays so far, where steps have no first gradient."""
        steps = list(self._blocked)
        return [wait for step in steps for wait in self._blocked.pop(step, [])]

    def take(self, step: int) -> Between:
        """Takes the script's times after a step; forgets these and those before."""
        found = Between(self._forwards_s.get(step, 0.0), self._blocked.get(step, []))
        for old in {*list(self._forwards_s), *list(self._blocked)}:
            if old <= step:
                self._forwards_s.pop(old, None)
                self._blocked.pop(old, None)
        return found


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

_FIRST, _EVERY = 32, 8
_SHORT_S = 0.2
"""After the first steps, one of so many that are short is measured, and stands for all: it takes
about as long as a small tensor's whole way."""


class LayerTime:
    """A key that a step pushes, and how long its passes take, in seconds."""

    __slots__ = ("backward_s", "forward_s", "key")

    def __init__(self, key: WorkerKey, forward_s: float, backward_s: float) -> None:
        self.key = key
        self.forward_s = forward_s
        self.backward_s = backward_s


class _Arrived(NamedTuple):
    """A key's new value."""

    at_s: float
    late_s: float
    """How much later than this worker's gradient the last one was ready."""
    server: int
    """Rank of the server whose slice came last."""


_NOT = _Arrived(0.0, 0.0, UNKNOWN)


class _Step:
    """Record of a step while its gradients become ready and its values arrive."""

    __slots__ = ("arrived", "first_s", "is_measured", "keys", "number", "ready_s")

    def __init__(self, number: int, first_s: float = 0.0, is_measured: bool = True) -> None:
        self.number = number
        self.first_s = first_s
        """When its first gradient was ready."""
        self.is_measured = is_measured
        self.keys: List[WorkerKey] = []
        self.ready_s: List[float] = []
        """When the keys' gradients were ready."""
        self.arrived: Dict[WorkerKey, _Arrived] = {}


class StepTimes:
    """Measures steps by what the worker's thread sees: gradients get ready, and values arrive; and
    by what the front end says of the script.

    A step begins when its first gradient is ready; so its time is that from one backward pass to
    the next. In the gap between the last gradient of a step and the first one of the next, the
    script does what it does, until it begins the next forward pass; then comes this pass, and
    whatever it has waited for. Nothing tells these two apart directly. But a forward pass can't
    reach a layer before the layer's value has arrived; it takes about the same part of the backward
    pass in each layer, and less than the backward pass. So each gap has a longest forward pass that
    its arrivals allow. Where that is no bound, because the forward pass has waited for one layer
    after the other, it is taken for half as long as the backward pass, which computes two products
    of matrices for each of its own. The lower quartile of the last gaps is taken: what disturbs a
    gap makes it longer. A pass that finds all values there has waited for none, and shows how long
    it takes. What a gap has more is waiting, as far as values were still missing when that pass
    came to their layers (`Wait.parts` says for what).

    Other processors of the host disturb these times; so do scripts that wait for all gradients
    before they push. Then layers are taken for equal. Belongs to the worker's thread; any thread
    may read the numbers.
    """

    def __init__(self, delay: Optional[ProcessorDelay] = None, loop: Optional[Loop] = None) -> None:
        """`loop`, this thread's, measures a step when it has sent what is urgent, since that takes
        longer than to send a slice; without one, steps are measured at once."""
        self.on_step: Callable[[int], None] = lambda steps: None
        """Called when a step has ended, with their number."""
        self.script = ScriptTimes()
        """The front end tells it; from the script's thread."""
        self.steps = 0
        """Steps that have ended; all times are theirs."""
        self.step_s = 0.0
        self.parts = Parts()
        self.forward_s = 0.0
        self.backward_s = 0.0
        """Time of one step, as estimated from the last ones, without waiting."""
        self.waited_for: Optional[WorkerKey] = None
        """The key for which the most forward passes have waited longest."""
        self._delay = delay
        self._loop = loop
        self._waits: Counter[WorkerKey] = Counter()
        self._step = _Step(0)
        self._begun = 0
        """How many steps have begun."""
        self._last = 0.0, Parts()
        """How long the last step took that was measured, and what that went into."""
        self.work = ServerWork()
        """What the servers say of it."""
        self._forwards_s: Deque[float] = deque(maxlen=_RECENT)
        self._backwards_s: Deque[float] = deque(maxlen=_RECENT)
        self._layers: Optional[Tuple[List[WorkerKey], List[float]]] = None
        self._local = LocalStepTimes(self.script, self.work)

    def begin_local_step(self, at_s: float) -> None:
        """A worker that trains by itself has updated its weights; where other stores of it have
        steps with gradients, these are measured alone."""
        ended = None if self._step.number else self._local.begin_step(at_s)
        if ended is not None:
            step_s, waits = ended
            self._count(at_s, step_s, 0.0, waits, sum(wait.seconds for wait in waits))

    def gradient_ready(self, transfer: Transfer) -> None:
        """Takes note of a transfer with a gradient, which was ready when it was made."""
        if transfer.step > self._step.number:
            self._next_step(transfer)
        if self._step.is_measured:
            self._step.keys.append(transfer.key)
            self._step.ready_s.append(transfer.ready_s)

    def _next_step(self, transfer: Transfer) -> None:
        before = self._step
        if before.number:
            end = self._end if before.is_measured else self._count_alike
            if self._loop is None:
                end(before, transfer.ready_s)
            else:
                self._loop.call_later(0.0, end, before, transfer.ready_s)
        self._begun += 1
        is_measured = (
            self._begun <= _FIRST or self._begun % _EVERY == 0 or self._last[0] >= _SHORT_S
        )
        self._step = _Step(transfer.step, transfer.ready_s, is_measured)

    def value_arrived(
        self, transfer: Transfer, late_s: float = 0.0, server: int = UNKNOWN, worked_us: int = 0
    ) -> None:
        """Takes note that all of a key's new value is here. The last gradient for it was ready
        `late_s` after this worker's; `server`, which sent the last slice, had worked for
        `worked_us` in all when it did."""
        step = self._step
        # What servers had done before a step that is measured is known from the step before.
        if not step.is_measured and (self._begun + 1) % _EVERY:
            return
        at_s = now_s()
        if server != UNKNOWN:
            self.work.note(server, at_s, worked_us)
        if not transfer.key.goes_on:
            step.arrived[transfer.key] = _Arrived(at_s, late_s, server)
        else:
            self._local.value_arrived(transfer, at_s, late_s, server)

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

    def _end(self, step: _Step, next_s: float) -> None:
        """Measures a step; the next one's first gradient was ready at `next_s`."""
        keys, ready_s = step.keys, list(accumulate(step.ready_s, max))
        first_s, last_s = ready_s[0], ready_s[-1]
        between = self.script.take(step.number)
        begin_s = min(max(last_s, between.forward_s), max(last_s, next_s))
        backward_s = (last_s - first_s) * len(keys) / max(1, len(keys) - 1)
        # The layer whose gradient comes first shows no backward time: it is taken for average.
        first_layer_s = backward_s / len(keys)
        gap_s = max(0.0, next_s - begin_s - first_layer_s)
        spread = backward_s > _SPREAD * gap_s
        # From a layer on, the forward pass has the layers that the backward pass had before it.
        if spread:
            left_s = [at - first_s + first_layer_s for at in ready_s]
            left_s[-1] = backward_s
            known_s = min((1 + _MOSTLY_KNOWN) * first_layer_s, backward_s)
        else:
            left_s = [(place + 1) / len(keys) for place in range(len(keys))]
            known_s = 0.0
        arrived = [step.arrived.get(key, _NOT) for key in keys]
        end_s, all_left_s = begin_s + gap_s, left_s[-1]
        usable_s = [
            begin_s if one.at_s < begin_s else end_s if one.at_s > end_s else one.at_s
            for one in arrived
        ]
        most_s = [
            (end_s - usable) * all_left_s / left if left >= known_s else math.inf
            for usable, left in zip(usable_s, left_s)
        ]
        most_forward_s = min(most_s)
        binding = most_s.index(most_forward_s)
        missing_s = max(usable_s) - begin_s
        if spread and missing_s > 0:
            # What a pass allows that has waited for later layers, too, is more than it took.
            waited_later = any(
                usable > usable_s[binding] + most_forward_s * (left_s[binding] - left) / all_left_s
                for usable, left in zip(usable_s[:binding], left_s)
            )
            if waited_later or most_forward_s >= backward_s:
                most_forward_s = min(most_forward_s, _FORWARD * backward_s)
        self._forwards_s.append(most_forward_s)
        self._backwards_s.append(backward_s)
        self.forward_s = _low(self._forwards_s)
        self.backward_s = statistics.median(self._backwards_s)
        longest_s = min(max(0.0, gap_s - self.forward_s), missing_s)
        waits = []
        if longest_s > 0:
            layers = [
                Layer(
                    self.forward_s * (1 - left / all_left_s), usable, ready + one.late_s, one.server
                )
                for left, usable, ready, one in zip(left_s, usable_s, step.ready_s, arrived)
            ]
            waits = forward_waits(begin_s, layers[::-1], self.work.between)
        if waits:
            self._waits[keys[binding]] += 1
            if self._waits[keys[binding]] >= self._waits[self.waited_for or keys[binding]]:
                self.waited_for = keys[binding]
        if spread:
            self._layers = keys, ready_s
        elif self._layers is None:
            self._layers = keys, [first_s] * len(keys)
        blocked = self._blocked(between, last_s, begin_s, step.ready_s, arrived)
        blocked_s = sum(wait.seconds for wait in blocked)
        self._count(
            next_s, max(0.0, next_s - first_s), begin_s - last_s - blocked_s, [*blocked, *waits],
            blocked_s + longest_s,
        )  # fmt: skip

    def _count_alike(self, step: _Step, next_s: float) -> None:
        """Counts a step that was not measured."""
        step_s = max(0.0, next_s - step.first_s)
        last_s, parts = self._last
        share = step_s / last_s if last_s else 0.0
        self.parts = self.parts.plus(Parts(*(part * share for part in parts)))
        self.step_s += step_s
        self.steps += 1
        self.on_step(self.steps)

    def _count(
        self, end_s: float, step_s: float, script_s: float, waits: List[Wait], longest_s: float
    ) -> None:
        """Counts a step; the rest is as in `parts_of_step`."""
        delayed = Delayed() if self._delay is None else self._delay.delayed()
        parts = parts_of_step(step_s, script_s, waits, longest_s, delayed)
        self._last = step_s, parts
        self.parts = self.parts.plus(parts)
        self.step_s += step_s
        self.work.forget(end_s)
        self.steps += 1
        self.on_step(self.steps)

    def _blocked(
        self,
        between: Between,
        last_s: float,
        begin_s: float,
        ready_s: List[float],
        arrived: List[_Arrived],
    ) -> List[Wait]:
        """Where the script itself has waited for values before it began the forward pass."""
        if not between.blocked:
            return []
        slowest = max(range(len(arrived)), key=lambda i: arrived[i].at_s)
        newest = arrived[slowest]
        last_ready_s = ready_s[slowest] + newest.late_s
        found = []
        for begin, end in between.blocked:
            begin, end = max(begin, last_s), min(end, begin_s, newest.at_s)
            if begin < end:
                worked_s = self.work.between(newest.server, begin, end)
                found.append(Wait(begin, end, last_ready_s, worked_s))
        return found


def _low(seconds: Deque[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[(len(seconds) - 1) // 4]
