"""This worker's transfers: each begins as soon as the window of its key admits it, and is done when
all of its value has arrived."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np

from p3kv.common.tracing import APPLIED, Tracer
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.fields import (
    EndedHeader,
    Header,
    PulledHeader,
    RowsHeader,
    SliceValueHeader,
    TransferHeader,
    UpdatedHeader,
)
from p3kv.wire.framing import Landing
from p3kv.wire.header import INITIAL_ROUND, NO_GRADIENT
from p3kv.wire.messages import UNKNOWN
from p3kv.worker.ahead import Ahead
from p3kv.worker.egress import Egress
from p3kv.worker.measuring.step_times import StepTimes
from p3kv.worker.saving.checkpoints import Checkpoints
from p3kv.worker.steps import WorkerSteps
from p3kv.worker.transfers import Ask, Transfer, WorkerKey, memory_at


class Exchange:
    """Has routes carry this worker's transfers, and ends their rounds.

    A transfer of a key's round is held until the one `window` rounds before it has ended. This is
    the back-pressure on a worker that is ahead. A held transfer is an operation of the framework
    that is not complete, so what depends on it waits, too, and servers keep few rounds. Rounds of a
    slice end in order, so one number says which rounds of a key have ended on all its servers.

    A push also waits for the pulls of its key that were called before it. They may begin later,
    when their arrays are ready, and a server answers with the newest value that it has: without an
    optimizer, the sum of the push's round in place of an initial value.

    Until a key's first round has ended, no more are open than the job's rule admits, though the
    key's own may have a wider window. Changing the slice size relies on this (`worker/tuning.py`),
    and so do pulls: a server that receives a pull for a round knows the slice size of that round.

    A push that the consistency rule does not exchange is added up, and the next one that it does
    brings the sum along.

    Belongs to the worker's thread, except `counts` and what says otherwise.
    """

    def __init__(
        self,
        egress: Egress,
        steps: WorkerSteps,
        times: StepTimes,
        checkpoints: Checkpoints,
        tracer: Tracer,
        priorities: bool,
        window: int,
    ) -> None:
        """`window`: how many rounds of a key may be open by the job's rule."""
        self.round = INITIAL_ROUND
        """The newest round for which a transfer was sent; for any thread."""
        self.counts = {
            "bytes_sent": 0,
            "bytes_received": 0,
            "slices_sent": 0,
            "slices_received": 0,
            "stale_values": 0,
            "stale_rounds": 0,
            "most_stale_rounds": 0,
        }
        """Any thread may read them."""
        self._egress = egress
        self._steps = steps
        self._times = times
        self._checkpoints = checkpoints
        self._tracer = tracer
        self._priorities = priorities
        self._window = window
        self._step = 0
        """The newest step of a transfer that was sent, of those that workers share."""
        self._positions: Dict[int, int] = {}
        self._sums: Dict[int, np.ndarray] = {}
        """By key, of gradients that were not exchanged."""
        self._too_early: Dict[Tuple[int, int], Transfer] = {}
        """Pushes by key and round, whose earlier rounds have not begun."""
        self._held: Dict[int, List[Transfer]] = {}
        """Transfers by key, which its window does not admit."""
        self._pushes: Set[Transfer] = set()
        """Those that want no result, and whose gradient is still needed."""
        self._updates: Dict[Tuple[int, int], Transfer] = {}
        """Those that expect the results of a round, by key and round."""
        self._pulls: Dict[int, Transfer] = {}
        """By the number of the request."""
        self._requests = itertools.count()
        self._expected: Dict[Tuple[int, int], Tuple[Transfer, Set[int]]] = {}
        """By key and round: a push whose round's end no result tells, and the servers that have not
        ended it yet."""
        self._ended: Dict[int, int] = {}
        """The last round of each key that has ended on all its servers."""
        self.ahead = Ahead(self.note_staleness)

    def set_order(self, key_ids: Sequence[int]) -> None:
        """Sends from now on in the order of these keys."""
        self._positions = {key_id: position for position, key_id in enumerate(key_ids)}

    @property
    def order(self) -> Sequence[int]:
        """The ids of the keys in the order that is in force; from any thread."""
        return list(self._positions)

    # A transfer begins.

    def begin(self, transfer: Transfer) -> None:
        """Sends a transfer, or asks for it, as soon as the window of its key admits its round, and
        a push not before those of earlier rounds. The framework may start them in any order, unless
        they share an array."""
        key = transfer.key
        if not transfer.is_exchanged:
            self._add_up(transfer)
        elif transfer.source is None or transfer.round <= key.begun:
            self._begin(transfer)
        elif transfer.round > key.begun + 1:
            self._too_early[key.key_id, transfer.round] = transfer
        else:
            following: Optional[Transfer] = transfer
            while following is not None:
                key.begun = following.round
                self._begin(following)
                following = self._too_early.pop((key.key_id, key.begun + 1), None)

    def _begin(self, transfer: Transfer) -> None:
        key = transfer.key
        if key.size_elems == 0:
            key.sent = max(key.sent, transfer.round)
            self._count_ended(transfer)
            transfer.done(None)
            transfer.tell(changes=False)
            self.note_answered(transfer)
            return
        if transfer.source is not None and transfer.round > INITIAL_ROUND:
            if self._sums:
                self._join_sum(transfer)
            if key.consistency.lets_go_ahead:
                transfer = self.ahead.instead_of(transfer)
            if key.consistency.local is None:  # or the next steps do not wait for it
                self._times.gradient_ready(transfer)
        if self._admits(transfer):
            self._send(transfer)
        else:
            self._held.setdefault(key.key_id, []).append(transfer)

    def _admits(self, transfer: Transfer) -> bool:
        """Whether a transfer may be sent now."""
        key = transfer.key
        if transfer.asks and transfer.source is not None and not _answered(transfer.asks):
            return False
        ended = self._ended.get(key.key_id)
        if ended is None:
            return transfer.round <= INITIAL_ROUND + min(self._window, key.consistency.window)
        return transfer.round <= ended + key.consistency.window

    def _send(self, transfer: Transfer) -> None:
        key = transfer.key
        if not self._priorities:
            transfer.priority = 0
        else:
            position = self._positions.get(key.key_id)
            if position is not None:
                transfer.priority = -position
        if transfer.source is None:
            key.route.request(transfer)
            return
        key.sent = transfer.round
        if transfer.round > self.round:
            self.round = transfer.round
        if key.own_rounds:
            self._steps.begin(transfer.step, own=True)
        else:
            if transfer.step > self._step:
                self._step = transfer.step
                self._steps.begin(transfer.step)
            self._egress.begin(transfer.step, transfer.size_bytes)
        if transfer.target is None:
            self._pushes.add(transfer)
            servers = {server for server, _ in key.runs}
            self._expected[key.key_id, transfer.round] = (transfer, servers)
        else:
            self._updates[key.key_id, transfer.round] = transfer
        key.route.push(transfer)
        if self._checkpoints.cuts:
            self._checkpoints.pushed()

    def _add_up(self, transfer: Transfer) -> None:
        """Adds a gradient that is not exchanged, which is needed no more then."""
        key = transfer.key
        if key.size_elems:
            gradient = _gradient(transfer)
            total = self._sums.get(key.key_id)
            if total is None:
                self._sums[key.key_id] = gradient.astype(key.sum_dtype)
            else:
                np.add(total, gradient, out=total)
        transfer.done(None)

    def _join_sum(self, transfer: Transfer) -> None:
        """Has a push bring along what was added up, also where it has no gradient itself."""
        total = self._sums.pop(transfer.key.key_id, None)
        if total is None:
            return
        if transfer.has_gradient:
            np.add(total, _gradient(transfer), out=total)
        with np.errstate(over="ignore"):
            transfer.replace_source(total.astype(transfer.key.numpy_dtype, copy=False))

    # What arrives.

    def add_update(self, transfer: Transfer) -> None:
        """Expects the results of a round in the transfer's target."""
        self._updates[transfer.key.key_id, transfer.round] = transfer

    def add_pull(self, transfer: Transfer) -> int:
        """Expects the key's value; returns the number of the request."""
        request = next(self._requests) % 2**32  # the size of its field in a header
        self._pulls[request] = transfer
        return request

    def update(self, key_id: int, round: int) -> Optional[Transfer]:
        """The transfer that expects a result of this round."""
        return self._updates.get((key_id, round))

    def pull(self, request: int) -> Optional[Transfer]:
        """The transfer that expects the answer to a request."""
        return self._pulls.get(request)

    @property
    def pulls(self) -> Sequence[Transfer]:
        """Those whose answers are still to come."""
        return list(self._pulls.values())

    def sent(self, transfer: Transfer) -> None:
        """A push that wants no result is done: its gradient is needed no more."""
        self._pushes.remove(transfer)
        transfer.done(None)

    def slice_sent(self, transfer: Transfer, elems: int) -> None:
        """Counts elements of such a push that are needed no more; the last ones complete it."""
        transfer.missing_elems -= elems
        if transfer.missing_elems == 0:
            self.sent(transfer)

    def slice_arrived(self, transfer: Transfer, piece: Slice, header: SliceValueHeader) -> None:
        """Counts a slice of the value that is in the target; the last one completes the
        transfer."""
        self.counts["slices_received"] += 1
        self.counts["bytes_received"] += header.payload_bytes
        if transfer.key.own_rounds and isinstance(header, UpdatedHeader):
            transfer.behind = max(transfer.behind, header.behind)
        if transfer.on_slice is not None:
            transfer.on_slice(piece.offset, piece.length)
        transfer.missing_elems -= piece.length
        if transfer.missing_elems == 0:
            self.arrived(transfer, header, header.late_us / 1e6, piece.server, header.worked_us)

    def arrived(
        self,
        transfer: Transfer,
        header: TransferHeader,
        late_s: float = 0.0,
        server: int = UNKNOWN,
        worked_us: int = 0,
    ) -> None:
        """All of a transfer's value has arrived: the last frame had this header. The rest is as in
        `StepTimes.value_arrived`."""
        key = transfer.key
        if isinstance(header, (PulledHeader, RowsHeader)):
            del self._pulls[header.request]
        else:
            del self._updates[key.key_id, transfer.round]
            key.filled = transfer.round, transfer.target
            if key.own_rounds and isinstance(header, UpdatedHeader):
                self.note_staleness(transfer.behind)
        self._times.value_arrived(transfer, late_s, server, worked_us)
        if not self._updates and not self._pulls:
            self._egress.values_complete()
        transfer.done(None)
        if self._tracer.enabled:
            self._tracer.span(transfer.span(APPLIED))
        if transfer.source is None:
            self.note_answered(transfer)
        elif transfer.target is not None:  # its result tells that its round has ended
            self._end_round(transfer, header)

    def note_staleness(self, rounds: int) -> None:
        """The worker goes on, by a rule other than the default, with a value of a whole key that
        lacks so many rounds."""
        self.counts["stale_values"] += 1
        self.counts["stale_rounds"] += rounds
        self.counts["most_stale_rounds"] = max(self.counts["most_stale_rounds"], rounds)

    def note_answered(self, transfer: Transfer) -> None:
        """Sends the pushes that have waited for a pull, if the transfer is one."""
        if transfer.source is None:
            for ask in transfer.asks:
                ask.answered = True
            self._send_held(transfer.key)

    # Rounds that end.

    def land_ended(self, connection: Connection, header: EndedHeader) -> Landing:
        """Takes the end of a round; ProtocolError if no push expects it."""
        push, servers = self._expected.get((header.key, header.round), (None, ()))
        if push is None or header.rank not in servers or header.payload_bytes:
            raise ProtocolError(
                f"it sent the end of round {header.round} of key {header.key} with "
                f"{header.payload_bytes} bytes, which nobody waits for"
            )
        if header.flags & NO_GRADIENT:
            push.check_lacking(header)
        return Landing(None, partial(self._round_ended, header))

    def _round_ended(self, header: EndedHeader) -> None:
        push, servers = self._expected[header.key, header.round]
        servers.remove(header.rank)
        if not servers:
            del self._expected[header.key, header.round]
            self._end_round(push, header)

    def _end_round(self, transfer: Transfer, header: Header) -> None:
        """A round has ended on all servers; `header` is that of the last frame that was to come."""
        key = transfer.key
        self._count_ended(transfer)
        if key.own_steps:
            key.own_steps.pop(transfer.round, None)
        if transfer.changes is not None:
            transfer.tell(changes=not header.flags & NO_GRADIENT)
        if transfer.route is not key.direct:
            transfer.route.ended(transfer)
        self._ended[key.key_id] = max(transfer.round, self._ended.get(key.key_id, INITIAL_ROUND))
        if key.key_id in self._held:
            self._send_held(key)

    def _count_ended(self, transfer: Transfer) -> None:
        if transfer.source is not None and transfer.round > INITIAL_ROUND:
            self._steps.count_ended(transfer.step, transfer.key.store)

    def _send_held(self, key: WorkerKey) -> None:
        """Sends the transfers of a key that are admitted now."""
        held = self._held.pop(key.key_id, [])
        free = [one for one in held if self._admits(one)]
        if len(free) < len(held):
            self._held[key.key_id] = [one for one in held if not self._admits(one)]
        for one in sorted(free, key=lambda one: one.round):
            self._send(one)

    # What is under way.

    def is_idle(self, key: WorkerKey) -> bool:
        """Whether nothing of a key is under way, and all rounds have ended that the script has
        called for it."""
        if key.size_elems == 0:
            return True  # nothing travels
        held = key.key_id in self._held or any(one == key.key_id for one, _ in self._expected)
        if held or self._ended.get(key.key_id, INITIAL_ROUND) < key.round:
            return False
        transfers = itertools.chain(self._pushes, self._updates.values(), self._pulls.values())
        return not any(one.key is key for one in transfers)

    def forget(self, key_id: int) -> None:
        """Nothing of a key is exchanged any more."""
        self._ended.pop(key_id, None)
        self._sums.pop(key_id, None)
        self.ahead.forget(key_id)
        self._positions.pop(key_id, None)

    def awaited(self) -> Iterator[Transfer]:
        """Updates whose values are still to come, then pulls; those for which the script may
        wait."""
        for transfer in itertools.chain(self._updates.values(), self._pulls.values()):
            if transfer.awaited_since_s is not None:
                yield transfer

    def awaited_since_s(self, key: WorkerKey, round: int) -> Optional[float]:
        """Since when the script waits for a round of a key, or may do, on the monotonic clock; None
        if it does not."""
        found = [one for one in self.awaited() if one.key is key and one.round >= round]
        return min((one.awaited_since_s or 0.0 for one in found), default=None)

    def oldest(self) -> Optional[Tuple[Transfer, Set[int]]]:
        """The oldest transfer of which values are still to come, or else the end of its round, and
        from which servers."""
        transfer = next(self.awaited(), None)
        if transfer is None:
            return next(iter(self._expected.values()), None)
        return transfer, transfer.route.missing(transfer)

    def fail(self, error: BaseException) -> None:
        """Ends all transfers with an error."""
        self.ahead.fail(error)
        for transfer, _ in self._expected.values():
            transfer.round_failed(error)
        under_way = self._pushes.union(self._updates.values(), self._pulls.values())
        held = itertools.chain.from_iterable(self._held.values())
        ending = [*under_way, *held, *self._too_early.values()]
        for kept in (self._pushes, self._updates, self._pulls, self._held, self._expected):
            kept.clear()
        self._too_early.clear()
        for transfer in ending:
            transfer.fail(error)


def _answered(asks: Sequence[Ask]) -> bool:
    return all(ask.answered for ask in asks)


def _gradient(transfer: Transfer) -> np.ndarray:
    assert transfer.source is not None
    memory = memory_at(transfer.source, transfer.key.size_bytes)
    return np.frombuffer(memory, transfer.key.numpy_dtype)
