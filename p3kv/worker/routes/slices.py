"""Slices on their way to the servers and back, each on its own: as they are, or encoded."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence, Set, Tuple

import numpy as np

from p3kv.codecs import Part, norm
from p3kv.common.tracing import Tracer, now_ns
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import PulledHeader, PullHeader, PushHeader, SliceValueHeader, UpdatedHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import (
    ACKNOWLEDGE,
    ENCODED,
    EXACT,
    HAS_VALUE,
    INITIAL_ROUND,
    NO_GRADIENT,
    WANTS_RESULT,
    Kind,
    clock_us,
)
from p3kv.wire.slice_sizes import FIRST_GENERATION, SliceSizesByRound
from p3kv.wire.tracing import trace_arrival, traced
from p3kv.worker.egress import Egress
from p3kv.worker.exchange import Exchange
from p3kv.worker.transfers import Pull, Push, SummedRoute, Transfer, WorkerKey, memory_at

_Landed = Tuple[Transfer, Slice, memoryview, Optional[memoryview], int]
"""A slice that arrives: where it goes in its transfer's target, its payload if that is encoded, and
when its header came, if it is traced."""


class _KeptSlice(Frame):
    """A slice of a gradient that stays as it is until the slice has arrived: no result tells."""

    __slots__ = ("piece", "route", "transfer")
    piece: Slice
    route: SliceRoute
    transfer: Push

    def arrived(self) -> None:
        self.route.sent(self.transfer, self.piece)


class _EncodedSlice(_KeptSlice):
    """A slice that is encoded when it begins to leave: a large tensor's first slice does not wait
    for its last. Its payload is the gradient."""

    __slots__ = ()

    def begin(self) -> memoryview:
        assert isinstance(self.payload, memoryview)
        return self.route.encoded(self.transfer, self.piece, self.payload)

    def arrived(self) -> None:
        if self.transfer.target is None:
            super().arrived()


class _Sum(Frame):
    """The sum of a host's gradients, made when it begins to leave."""

    __slots__ = ("encodes", "is_needed", "parts", "piece", "route", "total", "transfer")
    encodes: bool
    is_needed: bool
    """Whether the transfer waits until the sum is made."""
    parts: Sequence[np.ndarray]
    piece: Slice
    route: SliceRoute
    total: np.ndarray
    transfer: Push

    def begin(self) -> memoryview:
        total, parts = self.total, self.parts
        if len(parts) == 1:
            total[:] = parts[0]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(parts[0], parts[1], out=total, dtype=total.dtype)
                for one in parts[2:]:
                    np.add(total, one, out=total)
        if self.is_needed:
            self.route.sent(self.transfer, self.piece)
        summed = total.data.cast("B")
        if self.encodes:
            return self.route.encoded(self.transfer, self.piece, summed)
        self.route.count_bytes(summed)
        return summed


class SliceRoute(SummedRoute):
    """Sends each slice to its server, and takes those that come back. Belongs to the worker's
    thread."""

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        egress: Egress,
        exchange: Exchange,
        sizes: SliceSizesByRound,
        tracer: Tracer,
    ) -> None:
        self._rank = rank
        self._servers = servers
        self._egress = egress
        self._exchange = exchange
        self._sizes = sizes
        self._tracer = tracer

    def pieces(self, key: WorkerKey, round: int) -> Tuple[Slice, ...]:
        """A key's slices in a round, by index."""
        generation = FIRST_GENERATION if key.own_rounds else self._sizes.generation(round)
        if generation != key.generation:
            key.generation = generation
            key.pieces = key.slices(self._sizes.of(generation).slice_size)
        return key.pieces

    # On their way to the servers.

    def push(self, transfer: Push) -> None:
        transfer.route = self
        slices = transfer.pieces = self.pieces(transfer.key, transfer.round)
        # The result of a slice shows that it has arrived; without one the server has to say so,
        # because the gradient must stay as it is until then.
        no_result = transfer.target is None
        if not transfer.has_gradient:
            if transfer.key.memory is not None:
                transfer.key.memory.push_without_gradient(transfer.round)
            flags = NO_GRADIENT if no_result else NO_GRADIENT | WANTS_RESULT
            for piece in slices:
                self.send_empty(transfer, piece, flags)
                if no_result:
                    self._exchange.slice_sent(transfer, piece.length)
            return
        flags = ACKNOWLEDGE if no_result else WANTS_RESULT
        encodes = transfer.round > INITIAL_ROUND and not transfer.key.codecs.gradients.in_place
        if encodes:
            flags |= ENCODED
            if transfer.key.codecs.gradients.needs_norm:
                transfer.norm = norm(transfer.gradient())
        gives_value = transfer.round == INITIAL_ROUND and transfer.key.codecs.values.of_each_worker
        urgent, in_turn = transfer.urgent, not transfer.key.own_rounds
        zeros = transfer.key.zero_rows
        if zeros is not None and not (
            transfer.round > INITIAL_ROUND and zeros.looks(transfer.round)
        ):
            zeros = None
        assert transfer.source is not None
        whole = memory_at(transfer.source, transfer.key.size_bytes)
        item_bytes = transfer.key.item_bytes
        for piece in slices:
            start = piece.offset * item_bytes
            memory = whole[start : start + piece.length * item_bytes]
            if gives_value:
                self._note_as_it_is(transfer, piece, memory)
            if zeros is not None:
                parts = (np.frombuffer(memory, transfer.key.numpy_dtype),)
                encodes = zeros.left_out(transfer.round, parts, piece.offset)
                flags = flags | ENCODED if encodes else flags & ~ENCODED
            header = self._header(transfer, piece, flags)
            if not encodes and not no_result:
                self._queue(transfer, piece, Frame(urgent, header, memory, in_turn))
                continue
            frame = (_EncodedSlice if encodes else _KeptSlice)(urgent, header, memory, in_turn)
            frame.route, frame.transfer, frame.piece = self, transfer, piece
            self._queue(transfer, piece, frame)

    def gradient(self, transfer: Push, piece: Slice) -> np.ndarray:
        return transfer.gradient()[piece.offset : piece.offset + piece.length]

    def send_empty(self, transfer: Push, piece: Slice, flags: int, workers: int = 0) -> None:
        header = self._header(transfer, piece, flags, workers)
        in_turn = not transfer.key.own_rounds
        self._queue(transfer, piece, Frame(transfer.urgent, header, None, in_turn))

    def send_sum(
        self,
        transfer: Push,
        piece: Slice,
        parts: Sequence[np.ndarray],
        memory: Optional[np.ndarray],
        flags: int,
        workers: int,
        is_needed: bool,
    ) -> None:
        assert memory is not None
        key = transfer.key
        encodes = not key.codecs.gradients.in_place
        if key.zero_rows is not None and memory.dtype == key.numpy_dtype:
            encodes = key.zero_rows.left_out(transfer.round, parts, piece.offset)
        if encodes:
            flags |= ENCODED
        header = self._header(transfer, piece, flags, workers)
        frame = _Sum(transfer.urgent, header, None, not key.own_rounds)
        frame.route, frame.transfer, frame.piece = self, transfer, piece
        frame.parts, frame.total, frame.encodes = parts, memory, encodes
        frame.is_needed = is_needed and transfer.target is None
        self._queue(transfer, piece, frame)

    def _header(self, transfer: Push, piece: Slice, flags: int, workers: int = 0) -> PushHeader:
        """The header of a slice of a push; `workers`: of a sum, of how many it is."""
        if transfer.exact:
            flags |= EXACT
        if transfer.has_value and flags & WANTS_RESULT:
            flags |= self._has_value(transfer, flags)
        return PushHeader(
            Kind.PUSH, self._rank, flags, key=transfer.key.key_id, slice=piece.index,
            round=transfer.round, step=transfer.step, priority=transfer.priority,
            ready_us=clock_us(transfer.ready_s), workers=workers, lacking=transfer.lacking,
            weight=transfer.weight,
        )  # fmt: skip

    def _queue(self, transfer: Push, piece: Slice, frame: Frame) -> None:
        if frame.payload is not None or frame.makes_payload:
            self._exchange.counts["slices_sent"] += 1
            if not frame.makes_payload:  # else its bytes are counted when they are made
                assert isinstance(frame.payload, memoryview)
                self._exchange.counts["bytes_sent"] += len(frame.payload)
            if self._tracer.enabled:
                frame = traced(self._tracer, frame, piece.server)
        gate_step = transfer.step if transfer.key.is_gated else 0
        self._egress.push(piece.server, gate_step, frame)

    @staticmethod
    def _has_value(transfer: Push, flags: int) -> int:
        key = transfer.key
        if flags & NO_GRADIENT:
            return HAS_VALUE
        leaves_out = key.zero_rows is not None and key.zero_rows.leaves_out
        has_last = leaves_out and key.filled == (transfer.round - 1, transfer.target)
        return HAS_VALUE if has_last else 0

    def sent(self, transfer: Push, piece: Slice) -> None:
        """A slice of the gradient is needed no more."""
        self._exchange.slice_sent(transfer, piece.length)

    def encoded(self, transfer: Push, piece: Slice, memory: memoryview) -> memoryview:
        """A slice as it travels."""
        key = transfer.key
        out = memoryview(bytearray(key.codecs.gradients.most_bytes(piece.length)))
        elements = np.frombuffer(memory, key.numpy_dtype)
        payload = out[: key.encoder.encode(elements, _part(transfer, piece), out)]
        self.count_bytes(payload)
        return payload

    def count_bytes(self, payload: memoryview) -> None:
        """Counts a payload that was made when its frame began to leave."""
        self._exchange.counts["bytes_sent"] += len(payload)

    # On their way back.

    def request(self, transfer: Pull) -> None:
        transfer.route = self
        header = PullHeader(
            Kind.PULL, self._rank, EXACT if transfer.exact else 0, key=transfer.key.key_id,
            round=transfer.round, step=transfer.step, priority=transfer.priority,
            request=self._exchange.add_pull(transfer),
        )  # fmt: skip
        for server, _ in transfer.key.runs:
            frame = Frame(transfer.urgent, header)
            self._servers[server].writer.push(frame)

    def land(self, connection: Connection, header: SliceValueHeader) -> Landing:
        """Lands a slice from a server in the target; ProtocolError if no transfer expects it."""
        if isinstance(header, PulledHeader):
            transfer: Optional[Transfer] = self._exchange.pull(header.request)
        else:
            transfer = self._exchange.update(header.key, header.round)
        slices: Sequence[Slice] = ()
        if transfer is not None:
            slices = transfer.pieces or self.pieces(transfer.key, header.round)
        if transfer is None or transfer.target is None or header.slice >= len(slices):
            raise ProtocolError(
                f"it sent a frame of kind {header.kind} for key {header.key}, slice "
                f"{header.slice}, round {header.round}, which nobody waits for"
            )
        piece = slices[header.slice]
        memory = transfer.land(piece, connection.peer)
        if header.flags & NO_GRADIENT:
            transfer.check_lacking(header)
            if not header.payload_bytes:  # a sum to which nobody has added
                return None, (transfer, piece, memory, None, 0)
        since_ns = now_ns() if self._tracer.enabled else 0
        if header.flags & ENCODED:
            payload = self._memory_for_encoded(transfer, piece, header)
            return payload, (transfer, piece, memory, payload, since_ns)
        if len(memory) != header.payload_bytes:
            raise ProtocolError(
                f"it sent {header.payload_bytes} bytes for a slice of {len(memory)} bytes"
            )
        transfer.key.by_changes = False
        return memory, (transfer, piece, memory, None, since_ns)

    def take(self, connection: Connection, header: SliceValueHeader, landed: _Landed) -> None:
        """Decodes a slice that has arrived, if it is encoded, and counts it."""
        transfer, piece, memory, encoded, since_ns = landed
        if since_ns:
            trace_arrival(self._tracer, header, since_ns)
        if encoded is not None:
            elements = np.frombuffer(memory, transfer.key.numpy_dtype)
            transfer.key.decoder.decode(encoded, _part(transfer, piece), elements)
        elif header.payload_bytes and transfer.key.codecs.values.of_each_worker:
            self._note_as_it_is(transfer, piece, memory)
        if transfer.route is not self and isinstance(header, UpdatedHeader):
            transfer.route.landed(transfer, piece, header)
        self._exchange.slice_arrived(transfer, piece, header)

    def missing(self, transfer: Transfer) -> Set[int]:
        """All of the key, where each slice has begun to arrive and some are not complete."""
        slices = transfer.pieces or self.pieces(transfer.key, transfer.round)
        missing = {piece.server for piece in slices if transfer.misses(piece)}
        return missing or {piece.server for piece in slices}

    @staticmethod
    def _memory_for_encoded(
        transfer: Transfer, piece: Slice, header: SliceValueHeader
    ) -> memoryview:
        codec, key = transfer.key.codecs.values, transfer.key
        key.by_changes = codec.in_place
        # The last value is in the memory, or this worker has not said so.
        lacks = codec.in_place and key.filled != (transfer.round - 1, transfer.target)
        if lacks or header.payload_bytes > codec.most_bytes(piece.length):
            raise ProtocolError(
                f"it sent {header.payload_bytes} encoded bytes for a slice of {piece.length} "
                f"elements of {transfer.key.called}"
            )
        return memoryview(bytearray(header.payload_bytes))

    @staticmethod
    def _note_as_it_is(transfer: Transfer, piece: Slice, memory: memoryview) -> None:
        """Tells the decoder of a slice that this worker has as the server has it."""
        elements = np.frombuffer(memory, transfer.key.numpy_dtype)
        transfer.key.decoder.arrived_as_it_is(elements, _part(transfer, piece))


def _part(transfer: Transfer, piece: Slice) -> Part:
    return Part(piece.offset, transfer.round, transfer.own_step or transfer.step, transfer.norm)
