"""Sends slices to the servers and receives their results, in the worker's thread."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from p3kv.common.trace import Tracer
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.framing import Landing, Payload
from p3kv.wire.header import (
    ACKNOWLEDGE,
    ENCODED,
    INITIAL_ROUND,
    NO_GRADIENT,
    WANTS_RESULT,
    Header,
    Kind,
    clock_us,
    pack_header,
)
from p3kv.wire.queue import urgency
from p3kv.wire.spans import OnSent, traced_arrival, traced_departure
from p3kv.wire.terms import FIRST_GENERATION, TermsByRound
from p3kv.worker.departures import Departures
from p3kv.worker.gates import Gates
from p3kv.worker.host_sums import HostSums
from p3kv.worker.rows import RowsExchange, RowsPull, RowsPush
from p3kv.worker.spans import trace_applied
from p3kv.worker.step_times import StepTimes
from p3kv.worker.steps import Steps
from p3kv.worker.transfers import InProgress, Transfer, WorkerKey
from p3kv.worker.windows import Windows


class Exchange:
    """Sends and receives the slices of this worker's transfers.

    Belongs to the worker's thread, except `counts`, which any thread may read.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        gates: Gates,
        departures: Departures,
        terms: TermsByRound,
        steps: Steps,
        times: StepTimes,
        tracer: Tracer,
        priorities: bool,
        host_sums: HostSums,
        on_step: Callable[[int], None],
    ) -> None:
        """`on_step(step)` is called before the first transfer of a new step is sent, of those that
        workers share."""
        self.round = INITIAL_ROUND
        """The newest round for which a transfer was sent."""
        self.counts = {
            "bytes_sent": 0,
            "bytes_received": 0,
            "slices_sent": 0,
            "slices_received": 0,
        }
        self._rank = rank
        self._servers = servers
        self._gates = gates
        self._departures = departures
        self._terms = terms
        self._tracer = tracer
        self._priorities = priorities
        self._steps = steps
        self._times = times
        self._host_sums = host_sums
        self._on_step = on_step
        self._step = 0
        self._positions: Dict[int, int] = {}
        self._in_progress = InProgress()
        self._windows = Windows()
        self.rows = RowsExchange(
            rank, servers, gates, self._in_progress, self.counts, self._slice_size, times, tracer,
            self._answered,
        )  # fmt: skip
        """Takes over what travels by rows."""

    def set_order(self, key_ids: Sequence[int]) -> None:
        """Sends from now on in the order of these keys."""
        self._positions = {key_id: position for position, key_id in enumerate(key_ids)}

    @property
    def order(self) -> Sequence[int]:
        """The ids of the keys in the order that is in force; from any thread."""
        return list(self._positions)

    def begin(self, transfer: Transfer) -> None:
        """Queues a transfer's slices, or the requests for them, as soon as the window of its key
        admits the transfer's round."""
        if transfer.source is not None and transfer.round > INITIAL_ROUND:
            self._times.gradient_ready(transfer)
        if transfer.key.size_elems == 0:
            self._count_ended(transfer)
            transfer.done(None)
            _tell(transfer, changes=False)
            self._answered(transfer)
        elif self._windows.admits(transfer):
            self._send(transfer)
        else:
            self._windows.hold(transfer)

    def _send(self, transfer: Transfer) -> None:
        priority = self._priority(transfer)
        if transfer.source is None:
            if isinstance(transfer, RowsPull):
                self.rows.request(transfer, priority)
            else:
                self._send_requests(transfer, priority)
            return
        self.round = max(self.round, transfer.round)
        if not transfer.key.own_rounds:
            if transfer.step > self._step:
                self._step = transfer.step
                self._on_step(transfer.step)
            self._gates.begin(transfer.step, transfer.size_bytes)
            self._departures.begin(self._gates.all_begun)
        if transfer.target is None:
            self._in_progress.add_push(transfer)
        else:
            self._in_progress.add_update(transfer)
        if not self._ends_with_result(transfer):
            self._windows.expect(transfer)
        if isinstance(transfer, RowsPush):
            self.rows.push(transfer, priority)
        elif self._host_sums.takes(transfer):
            transfer.priority = priority
            slices = self._slices(transfer.key, transfer.round)
            self._host_sums.add(transfer, slices, urgency(transfer.step, priority))
        elif transfer.has_gradient:
            self._send_slices(transfer, transfer.source, priority)
        else:
            self._say_no_gradient(transfer, priority)

    def land(self, connection: Connection, header: Header) -> Landing:
        """Where a slice from a server goes, and the end of a round; ProtocolError if no transfer
        expects it."""
        if header.kind == Kind.ENDED:
            push = self._windows.check(header)
            if header.flags & NO_GRADIENT:
                _check_lacking(push, header)
            return Landing(None, partial(self._round_ended, header))
        transfer = self._transfer_for(header)
        slices = () if transfer is None else self._slices(transfer.key, header.round)
        if transfer is None or transfer.target is None or header.slice >= len(slices):
            raise ProtocolError(
                f"it sent a frame of kind {header.kind} for key {header.key}, slice "
                f"{header.slice}, round {header.round}, which nobody waits for"
            )
        piece = slices[header.slice]
        memory = transfer.land(piece, connection.peer)
        if header.flags & NO_GRADIENT:
            _check_lacking(transfer, header)
            if not header.payload_bytes:  # a sum to which nobody has added
                return Landing(None, partial(self.received, transfer, piece, header))
        if header.flags & ENCODED:
            return self._land_encoded(transfer, piece, header, memory)
        if len(memory) != header.payload_bytes:
            raise ProtocolError(
                f"it sent {header.payload_bytes} bytes for a slice of {len(memory)} bytes"
            )
        received = partial(self.received, transfer, piece, header)
        return Landing(memory, traced_arrival(self._tracer, header, received))

    def _land_encoded(
        self, transfer: Transfer, piece: Slice, header: Header, memory: memoryview
    ) -> Landing:
        codec = transfer.key.codecs.values
        if codec.in_place or header.payload_bytes > codec.most_bytes(piece.length):
            raise ProtocolError(
                f"it sent {header.payload_bytes} encoded bytes for a slice of {piece.length} "
                f"elements of {transfer.key.called}"
            )
        payload = memoryview(bytearray(header.payload_bytes))
        elements = np.frombuffer(memory, transfer.key.numpy_dtype)

        def decode() -> None:
            codec.decode(payload, elements)
            self.received(transfer, piece, header)

        return Landing(payload, traced_arrival(self._tracer, header, decode))

    def received(self, transfer: Transfer, piece: Slice, header: Header) -> None:
        """Counts a slice that has arrived; the last slice completes its transfer."""
        self.counts["slices_received"] += 1
        self.counts["bytes_received"] += header.payload_bytes
        if transfer.in_host_sum and header.kind == Kind.UPDATED:
            self._host_sums.spread(transfer, piece, header)
        transfer.missing_elems -= piece.length
        if transfer.missing_elems == 0:
            if header.kind == Kind.PULLED:
                self._in_progress.end_pull(header.step)
            else:
                self._in_progress.end_update(transfer)
            self._times.value_arrived(
                transfer.key, header.time_us / 1e6, piece.server, header.worked_us
            )
            if not self._in_progress.waits_for_values:
                self._gates.values_complete()
            transfer.done(None)
            trace_applied(self._tracer, transfer)
            if self._ends_with_result(transfer):
                self._end_round(transfer, header)
            else:
                self._answered(transfer)

    def _answered(self, transfer: Transfer) -> None:
        """Sends the pushes that have waited for a pull."""
        if transfer.source is None:
            for held in self._windows.answered(transfer):
                self._send(held)

    def awaited(self) -> Optional[Tuple[Transfer, Set[int]]]:
        """The oldest transfer of which values are still to come, or else the end of its round, and
        from which servers; all servers of the key if that is not known."""
        transfer = self._in_progress.oldest
        if transfer is None:
            return self._windows.oldest
        slices = [] if transfer.key.touched_only else self._slices(transfer.key, transfer.round)
        missing = {piece.server for piece in slices if transfer.misses(piece)}
        if transfer.in_host_sum:
            missing = {
                piece.server
                for piece in slices
                if transfer.misses(piece)
                and self._host_sums.carrier(transfer.key, piece) == self._rank
            }
            return transfer, missing
        return transfer, missing or {server for server, _ in transfer.key.runs}

    def _round_ended(self, header: Header) -> None:
        for push in self._windows.told(header):
            self._end_round(push, header)

    def fail(self, error: BaseException) -> None:
        """Ends all transfers with an error."""
        for transfer in self._windows.expecting:
            transfer.round_failed(error)
        for transfer in self._in_progress.clear() + self._windows.clear():
            transfer.fail(error)

    def _ends_with_result(self, transfer: Transfer) -> bool:
        """Whether a push's result tells that its round has ended, and is not perhaps older."""
        if transfer.source is None or transfer.target is None:
            return False
        key = transfer.key
        return key.own_rounds or key.consistency.needs(transfer.round) >= transfer.round

    def _end_round(self, transfer: Transfer, header: Header) -> None:
        """`header` is that of the last frame that was to come."""
        self._count_ended(transfer)
        _tell(transfer, changes=not header.flags & NO_GRADIENT)
        if transfer.in_host_sum:
            self._host_sums.ended(transfer)
        for held in self._windows.end(transfer):
            self._send(held)

    def _count_ended(self, transfer: Transfer) -> None:
        own = transfer.key.own_rounds
        if transfer.source is not None and transfer.round > INITIAL_ROUND and not own:
            self._steps.ended(transfer.step, transfer.key.store)

    def _priority(self, transfer: Transfer) -> int:
        if not self._priorities:
            return 0
        position = self._positions.get(transfer.key.key_id)
        return transfer.priority if position is None else -position

    def _send_requests(self, transfer: Transfer, priority: int) -> None:
        header = pack_header(
            Kind.PULL, self._rank, key=transfer.key.key_id, round=transfer.round,
            slice=self._in_progress.add_pull(transfer), step=transfer.step, priority=priority,
        )  # fmt: skip
        for server, _ in transfer.key.runs:
            self._servers[server].writer.push(urgency(transfer.step, priority), header)

    def _send_slices(self, transfer: Transfer, source: int, priority: int) -> None:
        key = transfer.key
        # The result of a slice shows that it has arrived; without one the server has to say so,
        # because the gradient must stay as it is until then.
        no_result = transfer.target is None
        flags = ACKNOWLEDGE if no_result else WANTS_RESULT
        encoded = transfer.round > INITIAL_ROUND and not key.codecs.gradients.in_place
        if encoded:
            flags |= ENCODED
        for piece in self._slices(key, transfer.round):
            memory = transfer.memory(source, piece)
            payload: Payload = partial(self._encoded, key, piece, memory) if encoded else memory
            on_arrived = partial(self.slice_is_free, transfer, piece) if no_result else None
            self._send_slice(transfer, piece, priority, payload, flags, on_arrived)

    def _say_no_gradient(self, transfer: Transfer, priority: int) -> None:
        """Has the round count this worker without a gradient."""
        flags = NO_GRADIENT if transfer.target is None else NO_GRADIENT | WANTS_RESULT
        for piece in self._slices(transfer.key, transfer.round):
            self._send_slice(transfer, piece, priority, None, flags)
            if transfer.target is None:
                self.slice_is_free(transfer, piece)

    def _send_slice(
        self,
        transfer: Transfer,
        piece: Slice,
        priority: int,
        payload: Optional[Payload],
        flags: int,
        on_arrived: Optional[Callable[[], None]] = None,
    ) -> None:
        key = transfer.key
        # What is made when the frame begins to leave gives the header its size, and is counted,
        # then.
        size_bytes = len(payload) if isinstance(payload, memoryview) else 0
        self.counts["bytes_sent"] += size_bytes
        header = pack_header(
            Kind.PUSH, self._rank, key=key.key_id, slice=piece.index, round=transfer.round,
            step=transfer.step, priority=priority, payload_bytes=size_bytes, flags=flags,
            time_us=clock_us(transfer.ready_s),
        )  # fmt: skip
        frame: Tuple[Optional[Payload], OnSent] = (None, None)
        if payload is not None:
            frame = traced_departure(
                self._tracer, payload, None, key.key_id, piece.server, transfer.round,
                transfer.step, piece.index, priority,
            )  # fmt: skip
            self.counts["slices_sent"] += 1
        # Gates count steps that workers share: nobody waits for gradients of an own step.
        gate_step = 0 if key.own_rounds else transfer.step
        urgent, in_turn = urgency(transfer.step, priority), not key.own_rounds
        self._gates.push(piece.server, gate_step, urgent, header, *frame, on_arrived, in_turn)

    def send_in_host_sum(
        self,
        transfer: Transfer,
        piece: Slice,
        total: Optional[Callable[[], memoryview]],
        flags: int,
    ) -> None:
        """Sends a slice of a transfer that is summed with others, or says that it is. `total` makes
        the sum when it begins to leave."""
        payload = None
        if total is not None:
            payload = partial(self._sum_as_it_travels, transfer.key, piece, total)
            if not transfer.key.codecs.gradients.in_place:
                flags |= ENCODED
        self._send_slice(transfer, piece, transfer.priority, payload, flags)

    def _sum_as_it_travels(
        self, key: WorkerKey, piece: Slice, total: Callable[[], memoryview]
    ) -> memoryview:
        memory = total()
        if not key.codecs.gradients.in_place:
            return self._encoded(key, piece, memory)
        self.counts["bytes_sent"] += len(memory)
        return memory

    def expect(self, transfer: Transfer) -> None:
        """Has values arrive in a transfer's target."""
        self._in_progress.add_update(transfer)

    def in_host_sum(self, header: Header) -> Tuple[Transfer, Slice]:
        """The transfer and the slice of which a neighbour's frame speaks; ProtocolError if none
        waits for it."""
        transfer = self._in_progress.update(header.key, header.round)
        if transfer is not None and transfer.in_host_sum:
            slices = self._slices(transfer.key, header.round)
            if header.slice < len(slices):
                return transfer, slices[header.slice]
        raise ProtocolError(
            f"it has a value for key {header.key}, slice {header.slice}, round {header.round}, "
            "for which nobody waits"
        )

    def _encoded(self, key: WorkerKey, piece: Slice, memory: memoryview) -> memoryview:
        """A slice as it travels, made when it begins to leave: a large tensor's first slice does
        not wait for its last."""
        codec = key.codecs.gradients
        out = memoryview(bytearray(codec.most_bytes(piece.length)))
        elements = np.frombuffer(memory, key.numpy_dtype)
        payload = out[: codec.encode(elements, piece.offset, out)]
        self.counts["bytes_sent"] += len(payload)
        return payload

    def slice_is_free(self, transfer: Transfer, piece: Slice) -> None:
        """Counts a slice of a push without a result that is needed no more."""
        transfer.missing_elems -= piece.length
        if transfer.missing_elems == 0:
            self._in_progress.end_push(transfer)
            transfer.done(None)

    def _transfer_for(self, header: Header) -> Optional[Transfer]:
        if header.kind == Kind.UPDATED:
            return self._in_progress.update(header.key, header.round)
        if header.kind == Kind.PULLED:
            return self._in_progress.pull(header.step)
        return None

    def _slices(self, key: WorkerKey, round: int) -> Tuple[Slice, ...]:
        generation = FIRST_GENERATION if key.own_rounds else self._terms.generation(round)
        return key.slices(self._terms.of(generation).slice_size)

    def _slice_size(self, round: int) -> int:
        return self._terms.of(self._terms.generation(round)).slice_size


def _tell(push: Transfer, changes: bool) -> None:
    """Tells a push without a gradient, when its round has ended, whether another worker had one."""
    if push.changes is not None:
        push.changes.set_result(changes)


def _check_lacking(push: Transfer, header: Header) -> None:
    """Raises ProtocolError for a round that ends without a gradient, though this worker had one."""
    if push.has_gradient or header.kind == Kind.PULLED:
        raise ProtocolError(
            f"it ended round {header.round} of {push.key.called} without a gradient, and this "
            "worker has sent one"
        )
