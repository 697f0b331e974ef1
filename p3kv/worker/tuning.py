"""Adapts slices to the network: how fast it is, and how long steps wait for it."""

from __future__ import annotations

import logging
import statistics
from collections import Counter, deque
from typing import Deque, Mapping, Optional

from p3kv.config import Settings
from p3kv.errors import ProtocolError
from p3kv.slicing import LEAST_CREDIT_BYTES, gradient_credit_bytes
from p3kv.wire.connection import Connection
from p3kv.wire.control import ControlClient
from p3kv.wire.fields import SliceSizesHeader
from p3kv.wire.header import INITIAL_ROUND, Kind
from p3kv.wire.loop import Drain
from p3kv.wire.messages import Measured, SliceSizes, encode
from p3kv.wire.slice_sizes import SliceSizesByRound
from p3kv.worker.egress import Egress
from p3kv.worker.step_times import StepTimes

_STEPS = 5
"""A worker reports the median of so many steps, so one disturbed step changes nothing."""
_LEAST_S, _LEAST_BYTES = 0.02, 256 << 10
"""A step in which connections were full for less time, or took fewer bytes, is not measured."""
_NEWS = 1.25
"""A worker reports its rate again when it has changed by this factor."""
_MORE_WAITING = 0.05
"""And when the share of its steps that is waiting has changed by so much."""
_EVEN = 0.9
"""Servers that keep so much of what any other keeps are on hosts that are alike."""
_PATIENT, _STILL_PATIENT = 0.5, 0.4
"""Gradients leave in turn when more of a step is waiting, and no longer when less is."""

_log = logging.getLogger(__name__)


class Tuning:
    """Changes the slice size from a round on, so that all processes use the same size in a round.

    Every worker measures in each step how fast its slices leave and for how long it waits, and
    reports that to the scheduler. The scheduler knows the slowest worker and the one that waits
    least, and tells worker rank 0 to announce a new size when the change is worth it. Belongs to
    the worker's thread.

    All processes must know the slice size of a round before its first slice leaves. Proof that they
    do: worker rank 0 announces the size before its first slice of a step s, for rounds from s +
    `window` on. `window` is the widest of the rules that the job and its stores have. A worker that
    pushes or pulls a key for such a round knows that the round `window` before it, or a later one,
    has ended on all servers of the key (`worker/transfers.py`). That round is s or later. Rank 0
    has pushed for it in step s or later, because no key has had more rounds than there were steps.
    So each of these servers had received the announcement before that push, and had passed
    it on before it said that the round has ended; to a worker that it welcomed later, at once. If
    rank 0 has left, its goodbye, which came after the announcement, is in the place of that push. A
    worker that has the values of that round from a neighbour has the announcement from it, too
    (`worker/routes/host_sums.py`).

    The proof holds for every consistency rule: a worker takes a round for ended when it has the
    round's own value or an ENDED frame, and not when an older value lets it go on. It holds for
    stores with a wider window that rank 0 makes after the announcement, too: whichever round of
    their keys has ended, rank 0 has pushed for it later still. Until any has ended, a worker pushes
    for no more rounds than the job's rule admits, and those are before s + `window`.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        sizes: SliceSizesByRound,
        settings: Settings,
        window: int,
        drain: Drain,
        times: StepTimes,
        egress: Egress,
        control: ControlClient,
    ) -> None:
        """`window`: how many rounds of a key may be open by the job's rule."""
        self._rank = rank
        self._servers = servers
        self._sizes = sizes
        self._settings = settings
        self._window = window
        self._drain = drain
        self._times = times
        self._egress = egress
        self._control = control
        self._seen = Drain()
        self._seen_step_s = self._seen_waiting_s = 0.0
        self._rates: Deque[float] = deque(maxlen=_STEPS)
        self._waits: Deque[float] = deque(maxlen=_STEPS)
        self._told = Measured(0.0)
        self._wanted: Optional[SliceSizes] = None
        self._kept_bytes: Counter[int] = Counter()
        """By server, what it keeps of all keys, as it travels."""
        self._shared = True
        """Whether the credit follows what servers keep."""

    def want(self, sizes: SliceSizes) -> None:
        """Takes the slice sizes that the scheduler has chosen; it tells only worker rank 0."""
        self._wanted = sizes

    def widen(self, window: int) -> None:
        """There is a store whose keys may have so many open rounds; before its first key."""
        self._window = max(self._window, window)

    def begin_step(self, step: int) -> None:
        """Measures the step before; call it before the first slice of `step` is sent."""
        if not self._shared:
            self._share_credit()
        self._measure_waiting()
        self._choose_order()
        if self._settings.slice_size is None:
            self._measure_rate()
            self._tell()
            if self._wanted is not None:
                self.announce(step + self._window, self._wanted)
                self._wanted = None

    def announce(self, from_round: int, sizes: SliceSizes) -> None:
        """Sets the slice sizes from a round on, and tells the servers first."""
        header = SliceSizesHeader(Kind.SLICE_SIZES, self._rank, from_round=from_round)
        self._egress.tell(header, encode(sizes))
        if from_round == INITIAL_ROUND:
            self._sizes.begin(sizes)
            self._share_credit()
        else:
            self.adopt(from_round, sizes)

    def adopt(self, from_round: int, sizes: SliceSizes) -> None:
        """Set announced slice sizes from a round on; ProtocolError for the first ones, and for
        those that contradict an earlier announcement."""
        if from_round <= INITIAL_ROUND:
            raise ProtocolError(
                f"it wants {sizes} from round {from_round} on, which each worker knows already"
            )
        if self._sizes.set(from_round, sizes):
            self._share_credit()
            _log.info("slices have %d elements from round %d on", sizes.slice_size, from_round)

    def note_kept(self, kept_bytes: Mapping[int, int]) -> None:
        """Takes note of what servers keep of a key, as it travels."""
        self._kept_bytes.update(kept_bytes)
        self._shared = False

    def note_forgotten(self, kept_bytes: Mapping[int, int]) -> None:
        """Takes note of what servers do not keep any more."""
        self._kept_bytes.subtract(kept_bytes)
        self._shared = False

    def _share_credit(self) -> None:
        """Shares the credit out by what each server keeps.

        Connections share a link in proportion to their bytes in its queue while these are few, and
        keep step by their credits where they are kept in step. With equal credit, a server that
        keeps twice as much as others would still get slices when all others are done. Keys of rows
        count like others: a step touches few rows, but all of them may be pushed or asked for.
        """
        self._shared = True
        newest = self._sizes.newest
        if self._settings.send_buffer_bytes is not None or newest is None:
            return
        count, total = len(self._servers), sum(self._kept_bytes.values())
        each_bytes = gradient_credit_bytes(newest.size_for_credit, count)
        for server, connection in self._servers.items():
            share = self._kept_bytes[server] / total if total else 1 / count
            connection.hold_at_most(max(LEAST_CREDIT_BYTES, round(each_bytes * count * share)))

    def _measure_rate(self) -> None:
        seen, self._seen = self._seen, Drain(self._drain.bytes, self._drain.seconds)
        seconds = self._seen.seconds - seen.seconds
        count = self._seen.bytes - seen.bytes
        if seconds < _LEAST_S or count < _LEAST_BYTES:
            return
        self._rates.append(count / seconds)

    def _measure_waiting(self) -> None:
        step_s = self._times.step_s - self._seen_step_s
        if step_s > 0:
            # Differences of sums: rounded, a step of waiting alone may be more than all of it.
            waiting_s = self._times.parts.waiting_s
            self._waits.append(min(1.0, (waiting_s - self._seen_waiting_s) / step_s))
            self._seen_step_s, self._seen_waiting_s = self._times.step_s, waiting_s

    def _choose_order(self) -> None:
        """Send gradients in turn where servers keep unequal parts, and steps mostly wait."""
        if len(self._waits) < _STEPS:
            return
        kept = [self._kept_bytes[server] for server in self._servers]
        uneven = min(kept, default=0) < _EVEN * max(kept, default=0)
        least = _STILL_PATIENT if self._egress.turns_pay else _PATIENT
        self._egress.turns_pay = uneven and statistics.median(self._waits) > least

    def _tell(self) -> None:
        if len(self._waits) < _STEPS:
            return
        told, waiting = self._told, statistics.median(self._waits)
        rate_bytes_s = told.rate_bytes_s
        if len(self._rates) == _STEPS:  # never where a codec leaves so little that no link is full
            rate_bytes_s = statistics.median(self._rates)
        news = told.rate_bytes_s / _NEWS, told.rate_bytes_s * _NEWS
        same_rate = rate_bytes_s == told.rate_bytes_s or news[0] < rate_bytes_s < news[1]
        if not same_rate or abs(waiting - told.waiting) > _MORE_WAITING:
            self._told = Measured(rate_bytes_s, waiting=waiting)
            self._control.send(self._told)
