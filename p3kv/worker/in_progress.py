"""Transfers that are under way, and what happens when all of a value has arrived."""

from __future__ import annotations

import itertools
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from p3kv.common.tracing import Tracer
from p3kv.slicing import Slice
from p3kv.wire.fields import (
    Header,
    PulledHeader,
    RowsHeader,
    SliceValueHeader,
    TransferHeader,
    UpdatedHeader,
)
from p3kv.wire.messages import UNKNOWN
from p3kv.worker.gates import Gates
from p3kv.worker.measuring.step_times import StepTimes
from p3kv.worker.spans import trace_applied
from p3kv.worker.transfers import Transfer, WorkerKey


class InProgress:
    """Transfers that are not done, by what a frame's header says of them.

    Belongs to the worker's thread, except `counts`, which any thread may read.
    """

    def __init__(
        self,
        gates: Gates,
        times: StepTimes,
        tracer: Tracer,
        on_value: Callable[[Transfer, Header], None],
    ) -> None:
        """`on_value` is told of each transfer that is done with its value, and the header of the
        last frame that has brought some of it."""
        self.counts = {
            "bytes_sent": 0,
            "bytes_received": 0,
            "slices_sent": 0,
            "slices_received": 0,
            "stale_values": 0,
            "stale_rounds": 0,
            "most_stale_rounds": 0,
        }
        self._gates = gates
        self._times = times
        self._tracer = tracer
        self._on_value = on_value
        self._pushes: Set[Transfer] = set()
        self._updates: Dict[Tuple[int, int], Transfer] = {}
        self._pulls: Dict[int, Transfer] = {}
        self._requests = itertools.count()

    def add_push(self, transfer: Transfer) -> None:
        """Keeps a push until its gradient is needed no more, or its value has arrived."""
        if transfer.target is None:
            self._pushes.add(transfer)
        else:
            self.add_update(transfer)

    def note_staleness(self, rounds: int) -> None:
        """The worker goes on, by a rule other than the default, with a value of a whole key that
        lacks so many rounds."""
        self.counts["stale_values"] += 1
        self.counts["stale_rounds"] += rounds
        self.counts["most_stale_rounds"] = max(self.counts["most_stale_rounds"], rounds)

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

    @property
    def pulls(self) -> Sequence[Transfer]:
        """Those whose answers are still to come."""
        return list(self._pulls.values())

    def pull(self, request: int) -> Optional[Transfer]:
        """The transfer that expects the answer to a request."""
        return self._pulls.get(request)

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
        if isinstance(header, (PulledHeader, RowsHeader)):
            del self._pulls[header.request]
        else:
            del self._updates[transfer.key.key_id, transfer.round]
            transfer.key.filled = transfer.round, transfer.target
            if transfer.key.own_rounds and isinstance(header, UpdatedHeader):
                self.note_staleness(transfer.behind)
        self._times.value_arrived(transfer, late_s, server, worked_us)
        if not self._updates and not self._pulls:
            self._gates.values_complete()
        transfer.done(None)
        trace_applied(self._tracer, transfer)
        self._on_value(transfer, header)

    @property
    def oldest(self) -> Optional[Transfer]:
        """First update of the transfers whose values are still to come, or the first pull; of those
        for which the script may wait."""
        return next(self.awaited(), None)

    def has(self, key: WorkerKey) -> bool:
        """Whether anything of a key is under way."""
        transfers = itertools.chain(self._pushes, self._updates.values(), self._pulls.values())
        return any(one.key is key for one in transfers)

    def awaited_since_s(self, key: WorkerKey, round: int) -> Optional[float]:
        """Since when the script waits for a round of a key, or may do, on the monotonic clock; None
        if it does not."""
        found = [one for one in self.awaited() if one.key is key and one.round >= round]
        return min((one.awaited_since_s or 0.0 for one in found), default=None)

    def awaited(self) -> Iterator[Transfer]:
        """Updates whose values are still to come, then pulls; those for which the script may
        wait."""
        for transfer in itertools.chain(self._updates.values(), self._pulls.values()):
            if transfer.awaited_since_s is not None:
                yield transfer

    def clear(self) -> List[Transfer]:
        """Forgets all transfers and returns them, each once."""
        transfers = self._pushes.union(self._updates.values(), self._pulls.values())
        self._pushes.clear()
        self._updates.clear()
        self._pulls.clear()
        return list(transfers)
