"""The size of slices: what the network carries in a few milliseconds, also when it changes."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from typing import Callable, Deque, Mapping, Optional

from p3kv.config import Settings
from p3kv.slicing import SliceSizes, gradient_credit_bytes
from p3kv.wire.connection import Connection
from p3kv.wire.header import INITIAL_ROUND, URGENT, WINDOW, Kind, pack_header
from p3kv.wire.loop import Drain

_STEPS = 5
"""What is told is the median of so many steps: one that was disturbed changes nothing."""
_LEAST_S, _LEAST_BYTES = 0.02, 256 << 10
"""Steps in which the network was waited for less say nothing about it."""
_NEWS = 1.25
"""A rate is told again when it has changed by this factor."""

_log = logging.getLogger(__name__)


class Tuning:
    """Keeps all agreed on the size of slices, which may change from one round to the next.

    Every worker measures from step to step how fast its slices leave, and tells the scheduler.
    That knows the slowest, and has worker rank 0 announce another size when that is worth it.
    Belongs to the worker's thread.

    Everybody must know the size of a round's slices before the first of them leaves. Worker rank 0
    announces it before its first slice of a step s, for rounds from s + `WINDOW` on. Whoever
    pushes a key for such a round, or pulls it, knows that the round `WINDOW` before, s or later,
    has ended on all servers of the key (`worker/windows.py`). Rank 0 has pushed for that in step s
    or later, since no key has had more rounds than there were steps; so each of these servers had
    the announcement before that push, and handed it on before the word that the round has ended.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        sizes: SliceSizes,
        settings: Settings,
        drain: Drain,
        report: Callable[[float], None],
    ) -> None:
        """`report` tells the scheduler a rate in bytes a second."""
        self._rank = rank
        self._servers = servers
        self._sizes = sizes
        self._settings = settings
        self._drain = drain
        self._report = report
        self._seen = Drain()
        self._rates: Deque[float] = deque(maxlen=_STEPS)
        self._told_bytes_s = 0.0
        self._wanted: Optional[int] = None

    def want(self, slice_size: int) -> None:
        """Takes the size that the scheduler has chosen; only worker rank 0 is asked to."""
        self._wanted = slice_size

    def begin_step(self, step: int) -> None:
        """Measures what went before; its first slice is still to be sent."""
        if self._settings.slice_size is None:
            self._measure()
            if self._wanted is not None:
                self.announce(step + WINDOW, self._wanted)
                self._wanted = None

    def announce(self, from_round: int, slice_size: int) -> None:
        """Has slices be of this size from a round on, and tells the servers beforehand."""
        header = pack_header(Kind.SLICES, self._rank, slice=slice_size, round=from_round)
        for connection in self._servers.values():
            connection.writer.push(URGENT, header)
        self.announced(from_round, slice_size)

    def announced(self, from_round: int, slice_size: int) -> None:
        """Has slices be of this size from a round on, as every server says that rank 0 said.

        Raises ProtocolError when it contradicts what was said before.
        """
        if not self._sizes.set(from_round, slice_size):
            return
        if self._settings.send_buffer_bytes is None:
            for connection in self._servers.values():
                connection.hold_at_most(gradient_credit_bytes(slice_size, len(self._servers)))
        if from_round > INITIAL_ROUND:
            _log.info("slices have %d elements from round %d on", slice_size, from_round)

    def _measure(self) -> None:
        seen, self._seen = self._seen, Drain(self._drain.bytes, self._drain.seconds)
        seconds = self._seen.seconds - seen.seconds
        count = self._seen.bytes - seen.bytes
        if seconds < _LEAST_S or count < _LEAST_BYTES:
            return
        self._rates.append(count / seconds)
        rate_bytes_s = statistics.median(self._rates)
        told = self._told_bytes_s
        if len(self._rates) == _STEPS and not told / _NEWS < rate_bytes_s < told * _NEWS:
            self._told_bytes_s = rate_bytes_s
            self._report(rate_bytes_s)
