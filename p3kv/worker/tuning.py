"""Adapts the slice size to the network: what it carries in a few milliseconds."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from typing import Callable, Deque, Mapping, Optional

from p3kv.config import Settings
from p3kv.slicing import gradient_credit_bytes
from p3kv.wire.connection import Connection
from p3kv.wire.header import INITIAL_ROUND, URGENT, Kind, pack_header
from p3kv.wire.loop import Drain
from p3kv.wire.messages import Terms, encode
from p3kv.wire.terms import TermsByRound

_STEPS = 5
"""A worker reports the median of so many steps, so one disturbed step changes nothing."""
_LEAST_S, _LEAST_BYTES = 0.02, 256 << 10
"""A step in which connections were full for less time, or took fewer bytes, is not measured."""
_NEWS = 1.25
"""A worker reports its rate again when it has changed by this factor."""

_log = logging.getLogger(__name__)


class Tuning:
    """Changes the slice size from a round on, so that all processes use the same size in a round.

    Every worker measures in each step how fast its slices leave, and reports the rate to the
    scheduler. The scheduler knows the slowest worker, and tells worker rank 0 to announce a new
    size when the change is worth it. Belongs to the worker's thread.

    All processes must know the slice size of a round before its first slice leaves. Proof that they
    do: worker rank 0 announces the size before its first slice of a step s, for rounds from s +
    `window` on. A worker that pushes or pulls a key for such a round knows that the round `window`
    before it has ended on all servers of the key (`worker/windows.py`). That round is s or later.
    Rank 0 has pushed for that round in step s or later, because no key has had more rounds than
    there were steps. So each of these servers had received the announcement before that push, and
    had passed it on before it said that the round has ended. If rank 0 has left, its goodbye, which
    came after the announcement, is in the place of that push. The proof holds for every consistency
    rule: a worker takes a round for ended when it has the round's own value or an ENDED frame, and
    not when an older value lets it go on.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        terms: TermsByRound,
        settings: Settings,
        window: int,
        drain: Drain,
        report: Callable[[float], None],
    ) -> None:
        """`window`: how many rounds of a key may be open.

        `report` tells the scheduler a rate in bytes a second.
        """
        self._rank = rank
        self._servers = servers
        self._terms = terms
        self._settings = settings
        self._window = window
        self._drain = drain
        self._report = report
        self._seen = Drain()
        self._rates: Deque[float] = deque(maxlen=_STEPS)
        self._told_bytes_s = 0.0
        self._wanted: Optional[int] = None

    def want(self, slice_size: int) -> None:
        """Takes the size that the scheduler has chosen; it tells only worker rank 0."""
        self._wanted = slice_size

    def begin_step(self, step: int) -> None:
        """Measures the step before; call it before the first slice of `step` is sent."""
        if self._settings.slice_size is None:
            self._measure()
            if self._wanted is not None:
                self.announce(step + self._window, Terms(self._wanted))
                self._wanted = None

    def announce(self, from_round: int, terms: Terms) -> None:
        """Sets the terms from a round on, and tells the servers first."""
        words = memoryview(encode(terms))
        header = pack_header(Kind.TERMS, self._rank, round=from_round, payload_bytes=len(words))
        for connection in self._servers.values():
            connection.writer.push(URGENT, header, words)
        self.announced(from_round, terms)

    def announced(self, from_round: int, terms: Terms) -> None:
        """Sets the terms from a round on; every server passes rank 0's announcement on.

        Raises ProtocolError when they contradict an earlier announcement.
        """
        if not self._terms.set(from_round, terms):
            return
        slice_size = terms.slice_size
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
