"""Sends slices to the servers and receives their results, in the worker's thread."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.trace import Tracer
from p3kv.wire.connection import Connection
from p3kv.wire.framing import Landing, Payload
from p3kv.wire.header import (
    ACKNOWLEDGE,
    ENCODED,
    INITIAL_ROUND,
    WANTS_RESULT,
    Header,
    Kind,
    pack_header,
)
from p3kv.wire.queue import urgency
from p3kv.wire.spans import traced_arrival, traced_departure
from p3kv.wire.terms import FIRST_GENERATION, TermsByRound
from p3kv.worker.gates import Gates
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
        terms: TermsByRound,
        steps: Steps,
        times: StepTimes,
        tracer: Tracer,
        priorities: bool,
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
        self._terms = terms
        self._tracer = tracer
        self._priorities = priorities
        self._steps = steps
        self._times = times
        self._on_step = on_step
        self._step = 0
        self._positions: Dict[int, int] = {}
        self._in_progress = InProgress()
        self._windows = Windows()
        self.rows = RowsExchange(
            rank, servers, gates, self._in_progress, self.counts, self._slice_size, times, tracer
        )
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
        if transfer.target is None:
            self._in_progress.add_push(transfer)
        else:
            self._in_progress.add_update(transfer)
        if not self._ends_with_result(transfer):
            self._windows.expect(transfer)
        if isinstance(transfer, RowsPush):
            self.rows.push(transfer, priority)
        else:
            self._send_slices(transfer, transfer.source, priority)

    def land(self, connection: Connection, header: Header) -> Landing:
        """Where a slice from a server goes, and the end of a round; ProtocolError if no transfer
        expects it."""
        if header.kind == Kind.ENDED:
            self._windows.check(header)
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
        if header.flags & ENCODED:
            return self._land_encoded(transfer, piece, header, memory)
        if len(memory) != header.payload_bytes:
            raise ProtocolError(
                f"it sent {header.payload_bytes} bytes for a slice of {len(memory)} bytes"
            )
        received = partial(self._received, transfer, piece, header)
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
            self._received(transfer, piece, header)

        return Landing(payload, traced_arrival(self._tracer, header, decode))

    def _received(self, transfer: Transfer, piece: Slice, header: Header) -> None:
        """Counts a slice that has arrived; the last slice completes its transfer."""
        self.counts["slices_received"] += 1
        self.counts["bytes_received"] += header.payload_bytes
        transfer.missing_elems -= piece.length
        if transfer.missing_elems == 0:
            if header.kind == Kind.PULLED:
                self._in_progress.end_pull(header.step)
            else:
                self._in_progress.end_update(transfer)
            self._times.value_arrived(transfer.key)
            if not self._in_progress.waits_for_values:
                self._gates.values_complete()
            transfer.done(None)
            trace_applied(self._tracer, transfer)
            if self._ends_with_result(transfer):
                self._end_round(transfer)

    def awaited(self) -> Optional[Tuple[Transfer, Set[int]]]:
        """The oldest transfer of which values are still to come, or else the end of its round, and
        from which servers; all servers of the key if that is not known."""
        transfer = self._in_progress.oldest
        if transfer is None:
            return self._windows.oldest
        slices = [] if transfer.key.touched_only else self._slices(transfer.key, transfer.round)
        missing = {piece.server for piece in slices if transfer.misses(piece)}
        return transfer, missing or {server for server, _ in transfer.key.runs}

    def _round_ended(self, header: Header) -> None:
        for push in self._windows.told(header):
            self._end_round(push)

    def fail(self, error: BaseException) -> None:
        """Ends all transfers with an error."""
        for transfer in self._in_progress.clear() + self._windows.clear():
            transfer.done(error)

    def _ends_with_result(self, transfer: Transfer) -> bool:
        """Whether a push's result tells that its round has ended, and is not perhaps older."""
        if transfer.source is None or transfer.target is None:
            return False
        key = transfer.key
        return key.own_rounds or key.consistency.needs(transfer.round) >= transfer.round

    def _end_round(self, transfer: Transfer) -> None:
        self._count_ended(transfer)
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
        urgent = urgency(transfer.step, priority)
        encoded = transfer.round > INITIAL_ROUND and not key.codecs.gradients.in_place
        if encoded:
            flags |= ENCODED
        # Gates count steps that workers share: nobody waits for gradients of an own step.
        gate_step = 0 if key.own_rounds else transfer.step
        slices = self._slices(key, transfer.round)
        for piece in slices:
            memory = transfer.memory(source, piece)
            payload: Payload = partial(self._encoded, key, piece, memory) if encoded else memory
            header = pack_header(
                Kind.PUSH, self._rank, key=key.key_id, slice=piece.index, round=transfer.round,
                step=transfer.step, priority=priority, payload_bytes=len(memory), flags=flags,
            )  # fmt: skip
            frame = traced_departure(
                self._tracer, payload, None, key.key_id, piece.server, transfer.round,
                transfer.step, piece.index, priority,
            )  # fmt: skip
            on_arrived = partial(self._slice_arrived, transfer, piece) if no_result else None
            self._gates.push(piece.server, gate_step, urgent, header, *frame, on_arrived)
        self.counts["slices_sent"] += len(slices)
        if not encoded:
            self.counts["bytes_sent"] += key.size_bytes

    def _encoded(self, key: WorkerKey, piece: Slice, memory: memoryview) -> memoryview:
        """A slice as it travels, made when it begins to leave: a large tensor's first slice does
        not wait for its last."""
        codec = key.codecs.gradients
        out = memoryview(bytearray(codec.most_bytes(piece.length)))
        elements = np.frombuffer(memory, key.numpy_dtype)
        payload = out[: codec.encode(elements, piece.offset, out)]
        self.counts["bytes_sent"] += len(payload)
        return payload

    def _slice_arrived(self, transfer: Transfer, piece: Slice) -> None:
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
