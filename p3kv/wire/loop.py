"""The event loop of a process: one thread, its sockets, its timers."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import math
import select
import socket
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Callable, Collection, Deque, Dict, Iterable, List, Optional, Set, Tuple

from p3kv.wire.connection import Connection

_BATCH_S = 0.01
"""For how long a batch of calls may hold up the loop."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00003, 0.0005
_PAUSE = 0.25
"""A batch is over when no call has come for this part of the time that it has taken, if nobody says
so before. So a call that comes alone is hardly delayed, and a long batch is not disturbed often."""
_SLACK_NS = 1000
_PR_SET_TIMERSLACK = 29
"""From Linux' prctl.h. Linux ends a thread's waits up to 50 us late, to join them with others'."""
_LEAD = 2.0
"""By how many credits a connection may be ahead: with much less, links run dry."""
_STUCK_S = 1.0
"""A connection that has frames and has sent nothing for so long holds up no other."""


class _Progress:
    """How far a connection is."""

    __slots__ = ("credits", "since_s")

    def __init__(self, credits: float, since_s: float) -> None:
        self.credits = credits
        """Amount that it has sent, in its own credits."""
        self.since_s = since_s
        """When it last sent, or had nothing to send."""


class Pacing:
    """Keeps connections that have frames to send in step, each by its own credit.

    Connections get about equal parts of a link as soon as each always has bytes for it, however
    many. So one that is to carry twice as much as others would be done last, and its peer's link
    would idle meanwhile. In step, a connection that is ahead waits for the others.
    """

    def __init__(self) -> None:
        self._progress: Dict[Connection, _Progress] = {}
        self._furthest = math.inf
        """How far a connection may be and still send."""
        self._keeps = False

    @property
    def keeps(self) -> bool:
        """Whether connections are kept in step."""
        return self._keeps

    @keeps.setter
    def keeps(self, keeps: bool) -> None:
        if keeps != self._keeps:
            self._keeps, self._furthest = keeps, math.inf
            self._progress.clear()

    def choose(self, connections: Collection[Connection]) -> List[Connection]:
        """Chooses those of a process's connections that have something to send, and can and may."""
        able = [one for one in connections if not one.blocked and one.writer]
        if not self._keeps:
            return able
        self._look(connections)
        return [one for one in able if self.allows(one)]

    def sent(self, connection: Connection, size_bytes: int) -> None:
        """Takes note of what a connection has sent."""
        place = self._progress.get(connection)
        if place is not None:
            place.credits += size_bytes / connection.credit_bytes
            place.since_s = time.monotonic()

    def allows(self, connection: Connection) -> bool:
        """Whether the connection is not too far ahead of the others that `choose` saw."""
        place = self._progress.get(connection)
        return place is None or place.credits <= self._furthest

    def _look(self, connections: Collection[Connection]) -> None:
        """Finds the connection that is last, and has those that hold up no other keep level."""
        now, last, level = time.monotonic(), math.inf, []
        for one in connections:
            if not one.in_network:
                continue
            place = self._progress.get(one)
            if place is None:
                place = self._progress[one] = _Progress(0.0, now)
            if not one.writer:
                place.since_s = now
            elif now - place.since_s < _STUCK_S:
                last = min(last, place.credits)
                continue
            level.append(place)
        self._furthest = last + _LEAD
        if last < math.inf:
            for place in level:
                place.credits = max(place.credits, last)


@dataclass
class Inversions:
    """Frames that began to leave while a more urgent one waited for a connection that was full, or
    held back by `Pacing`."""

    frames: int = 0
    bytes: int = 0


@dataclass
class Drain:
    """Bytes that the network took while some connection was full, and for how long one was."""

    bytes: int = 0
    seconds: float = 0.0

    def link_s(self) -> float:
        """Seconds for a byte; 0, as on a fast link, while no connection has been full for long."""
        return self.seconds / self.bytes if self.seconds > 0.1 and self.bytes else 0.0


class Loop:
    """Reads and writes connections; writes the most urgent frame first. Everything but `call_soon`,
    `call_soon_batched` and `end_batch` belongs to the thread that calls `run`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._epoll.register(self._wake_reader.fileno(), select.EPOLLIN)
        self._readers: Dict[int, Callable[[], None]] = {
            self._wake_reader.fileno(): self._drain_wake
        }
        self._connections: Dict[int, Connection] = {}
        self._inbox: Deque[Tuple[Callable[..., None], Tuple[Any, ...]]] = deque()
        self._timers: List[Tuple[float, int, Callable[..., None], Tuple[Any, ...]]] = []
        self._timer_numbers = itertools.count()
        self._batched = 0
        self._batched_seen = 0
        """Calls of `call_soon_batched` until now, and until the loop last looked."""
        self._asleep = False
        self._running = False
        self._full: Set[Connection] = set()
        """Connections that were full; epoll tells when they can take data."""
        self._drained: Set[Connection] = set()
        """Connections that were full, and can take data again, but have sent none since."""
        self._full_since: Optional[float] = None
        self._worked_s = 0.0
        """In all turns before this one."""
        self._woke_s: Optional[float] = None
        """When this turn began; None while the loop waits for events."""
        self.inversions = Inversions()
        self.drain = Drain()
        self.pacing = Pacing()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Has the loop's thread call `function`; from any thread, in order of the calls."""
        self._inbox.append((function, arguments))
        if self._asleep:
            self._wake()

    def call_soon_batched(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls like `call_soon`, but lets the caller finish a batch of calls first.

        While more such calls come, the loop leaves the GIL to the caller, for `_BATCH_S` at most;
        then it makes all calls.
        """
        self._batched += 1
        self._inbox.append((function, arguments))
        if self._asleep:
            self._wake()

    def end_batch(self) -> None:
        """Says that the thread that makes batches of calls has made the last one of this batch."""
        self._batched_seen = self._batched

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        """Calls `function` in `delay_s` seconds."""
        deadline = time.monotonic() + delay_s
        heapq.heappush(self._timers, (deadline, next(self._timer_numbers), function, arguments))

    def add_reader(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Calls `ready` whenever the descriptor is readable, until `remove_reader`."""
        self._readers[descriptor] = ready
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove_reader(self, descriptor: int) -> None:
        """Undoes `add_reader`."""
        if self._readers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def add_connection(self, connection: Connection) -> None:
        """Serves `connection` until it is lost or closed."""
        self._connections[connection.descriptor] = connection
        self._epoll.register(connection.descriptor, select.EPOLLIN)

    def pause_connection(self, connection: Connection) -> None:
        """Stops serving `connection` until it is added again, perhaps with another link."""
        if self._connections.pop(connection.descriptor, None) is not None:
            self._full.discard(connection)
            self._epoll.unregister(connection.descriptor)

    def remove_connection(self, connection: Connection) -> None:
        """Stops serving `connection`, and closes it."""
        self.pause_connection(connection)
        connection.close()

    def run(self, work: Callable[[], bool] = lambda: False) -> None:
        """Serves everything until `stop`.

        `work` is called between the events and does one piece of work; it returns whether
        there is more, in which case the loop looks for events without waiting for them.
        """
        self._running = not self._epoll.closed
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))
        while self._running:
            self._wait_for_batch()
            self._call_inbox()
            more_work = work()
            self._send()
            if not self._running:
                break
            looked_at = time.monotonic()
            self._worked_s, self._woke_s = self.worked_s, None
            found = self._epoll.poll(self._timeout(more_work))
            self._woke_s = time.monotonic()
            for descriptor, events in found:
                self._serve(descriptor, events)
            self._asleep = False
            self._call_timers(looked_at)

    @property
    def worked_s(self) -> float:
        """For how long `run` has done anything but wait for events."""
        this_turn_s = 0.0 if self._woke_s is None else time.monotonic() - self._woke_s
        return self._worked_s + this_turn_s

    def send_now(self, connection: Connection) -> None:
        """Sends what `connection` can take of its frames, before `run` is called."""
        self._send_all([connection])

    def stop(self) -> None:
        """Ends `run` after the current turn."""
        self._running = False

    def close(self) -> None:
        """Closes all sockets and ends `run`; may be called twice."""
        self._running = False
        for connection in list(self._connections.values()):
            self.remove_connection(connection)
        if not self._epoll.closed:
            self._epoll.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _timeout(self, more_work: bool) -> float:
        if more_work:
            return 0
        self._asleep = True
        # A call from now on wakes the loop; an earlier call is seen here.
        if self._inbox:
            return 0
        if self._timers:
            return max(0.0, self._timers[0][0] - time.monotonic())
        return -1

    def _serve(self, descriptor: int, events: int) -> None:
        connection = self._connections.get(descriptor)
        if connection is None:
            ready = self._readers.get(descriptor)
            if ready is not None:
                ready()
            return
        if events & select.EPOLLOUT:
            if connection.blocked:
                connection.blocked = False
                if connection.in_network:
                    self._drained.add(connection)
            else:  # it has not been full again since
                self._full.discard(connection)
                self._epoll.modify(descriptor, select.EPOLLIN)
        if events & ~select.EPOLLOUT:
            connection.receive()

    def _send(self) -> None:
        """Writes until no connection has frames that it can and may send, the most urgent frame
        first."""
        # A frame that is sent may queue new frames, also on connections that had none.
        while ready := self.pacing.choose(self._connections.values()):
            self._send_all(ready)
        self._drained.clear()
        now = time.monotonic()
        if self._full_since is not None:
            self.drain.seconds += now - self._full_since
        full = any([one.blocked and one.in_network for one in self._connections.values()])
        self._full_since = now if full else None

    def _send_all(self, ready: List[Connection]) -> None:
        can = set(ready)
        held = _most_urgent(one for one in self._connections.values() if one not in can)
        while ready:
            best = ready[0]
            if len(ready) > 1:
                best = max(ready, key=lambda connection: connection.writer.top_priority())
            self._send_on(best, held)
            if best.blocked:
                if best.descriptor in self._connections and best not in self._full:
                    self._full.add(best)
                    self._epoll.modify(best.descriptor, select.EPOLLIN | select.EPOLLOUT)
                ready.remove(best)
            elif not best.writer or not self.pacing.allows(best):
                ready.remove(best)
            else:
                continue
            held = max(held, _most_urgent([best]))

    def _send_on(self, connection: Connection, held: float) -> None:
        """Writes once, and counts an inversion if a more urgent frame waits elsewhere: `held` is
        the priority of the most urgent one that can't or may not leave."""
        writer = connection.writer
        priority = writer.waiting_priority()
        frames, begun = writer.begun_frames, writer.begun_bytes
        count = connection.send()
        self.pacing.sent(connection, count)
        self._move_to_back(connection)
        if connection in self._drained:
            self.drain.bytes += count
        elif connection.in_network:
            # Of a large frame the link takes more than it holds for long.
            self.drain.bytes += max(0, count - 2 * connection.credit_bytes)
        if priority is not None and held > priority:
            self.inversions.frames += writer.begun_frames - frames
            self.inversions.bytes += writer.begun_bytes - begun

    def _move_to_back(self, connection: Connection) -> None:
        """Ties: of equally urgent frames, the connection that has been idle longest sends first.
        With the same fixed order on all servers, worker 0 would receive every value first."""
        if self._connections.pop(connection.descriptor, None) is not None:
            self._connections[connection.descriptor] = connection

    def _wait_for_batch(self) -> None:
        """Leaves the GIL to the thread that makes a batch of calls, until no more come."""
        if self._batched == self._batched_seen:
            return
        began_s, took_s = time.monotonic(), 0.0
        while self._batched != self._batched_seen and took_s < _BATCH_S:
            self._batched_seen = self._batched
            time.sleep(min(max(_PAUSE * took_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            took_s = time.monotonic() - began_s
        self._batched_seen = self._batched

    def _call_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            function, arguments = self._inbox.popleft()
            function(*arguments)

    def _call_timers(self, looked_at: float) -> None:
        """Calls timers that were due when the loop looked for events. After a long piece of work, a
        peer's message may be waiting. Its timeout must not fire before the message is read."""
        while self._timers and self._timers[0][0] <= looked_at:
            _, _, function, arguments = heapq.heappop(self._timers)
            function(*arguments)

    def _wake(self) -> None:
        with suppress(OSError):  # wake-ups are waiting already, or the loop is closed
            self._wake_writer.send(b"\0")

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass


def _most_urgent(held: Iterable[Connection]) -> float:
    """The priority of the most urgent frame that waits on any of them."""
    waiting = (connection.writer.waiting_priority() for connection in held)
    return max((priority for priority in waiting if priority is not None), default=-math.inf)
