"""This worker's transfers: each is sent as soon as the channel of its key admits it, and is done
when all of its value has arrived."""

from __future__ import annotations

import itertools
from typing import Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

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
from p3kv.wire.framing import urgency
from p3kv.wire.header import INITIAL_ROUND, NO_GRADIENT
from p3kv.wire.messages import UNKNOWN
from p3kv.worker.egress import Egress
from p3kv.worker.step_times import StepTimes
from p3kv.worker.steps import WorkerSteps
from p3kv.worker.transfers import (
    Channel,
    Counts,
    DeferredPush,
    Pull,
    Push,
    Snapshots,
    Transfer,
    WorkerKey,
)


class Exchange:
    """Sends this worker's transfers by routes, and ends their rounds; in the worker's thread,
    except `counts` and what says otherwise."""

    def __init__(
        self,
        keys: Mapping[int, WorkerKey],
        egress: Egress,
        steps: WorkerSteps,
        times: StepTimes,
        tracer: Tracer,
        priorities: bool,
    ) -> None:
        """`keys`: those that are declared, by id."""
        self.round = INITIAL_ROUND
        """The newest round for which a transfer was sent; for any thread."""
        self.counts = Counts()
        self.keys = keys
        self._egress = egress
        self._steps = steps
        self._times = times
        self._tracer = tracer
        self._priorities = priorities
        self._step = 0
        """The newest step of a transfer that was sent, of those that workers share."""
        self._positions: Dict[int, int] = {}
        self._pulls: Dict[int, Pull] = {}
        """By the number of the request."""
        self._requests = itertools.count()
        self._missing_values = 0
        """How many transfers wait for the rest of their values."""

    @property
    def known_round(self) -> int:
        """The newest round for which a transfer was sent, or UNKNOWN; from any thread."""
        return self.round if self.round > INITIAL_ROUND else UNKNOWN

    def set_order(self, key_ids: Sequence[int]) -> None:
        """Sends from now on in the order of these keys."""
        self._positions = {key_id: position for position, key_id in enumerate(key_ids)}

    @property
    def order(self) -> Sequence[int]:
        """The ids of the keys in the order that is in force; from any thread."""
        return list(self._positions)

    # A transfer begins.

    def begin(self, transfer: Transfer) -> None:
        """Send a transfer when its channel admits it; pushes in the order of rounds, though the
        framework may start them in any."""
        channel = transfer.key.channel
        if isinstance(transfer, Push):
            if transfer.round > channel.begun + 1:
                channel.early[transfer.round] = transfer
                return
            following: Optional[Push] = transfer
            while following is not None:
                channel.begun = max(channel.begun, following.round)
                self._begin_push(channel, following)
                following = channel.early.pop(channel.begun + 1, None) if channel.early else None
        elif isinstance(transfer, DeferredPush):
            channel.defer(transfer)
        elif isinstance(transfer, Pull):
            if channel.key.size_elems == 0:
                self._complete_empty(channel, transfer)
            elif channel.admits(transfer):
                self._send(transfer)
            else:
                channel.waiting.append(transfer)

    def _begin_push(self, channel: Channel, push: Push) -> None:
        if channel.key.size_elems == 0:
            self._complete_empty(channel, push)
            return
        if push.round > INITIAL_ROUND:
            if channel.deferred is not None:
                channel.join_deferred(push)
            if push.takes is not None:
                if channel.snapshots is None:
                    channel.snapshots = Snapshots(channel, self.counts)
                push = channel.snapshots.split(push)
            if not channel.key.trains_locally:  # or the next steps do not wait for it
                self._times.gradient_ready(push)
        if push.round <= channel.admitted and push.after_pulls <= channel.answered:
            self._send(push)
        else:
            channel.waiting.append(push)

    def _complete_empty(self, channel: Channel, transfer: Union[Push, Pull]) -> None:
        """Nothing travels of a key without elements."""
        channel.sent = max(channel.sent, transfer.round)
        transfer.done(None)
        if isinstance(transfer, Pull):
            self.note_answered(transfer)
            return
        if transfer.round > INITIAL_ROUND:
            self._steps.count_ended(transfer.step, transfer.key.store)
        if transfer.changes is not None:
            transfer.changes.set_result(False)

    def _send(self, transfer: Union[Push, Pull]) -> None:
        key = transfer.key
        if not self._priorities:
            transfer.priority = 0
        else:
            position = self._positions.get(key.key_id)
            if position is not None:
                transfer.priority = -position
        transfer.urgent = urgency(transfer.step, transfer.priority)
        if isinstance(transfer, Pull):
            key.route.request(transfer)
            return
        channel = key.channel
        channel.sent = transfer.round
        if transfer.round > self.round:
            self.round = transfer.round
        if key.own_rounds:
            self._steps.begin(transfer.step, own=True)
        else:
            if transfer.step > self._step:
                self._step = transfer.step
                self._steps.begin(transfer.step)
            self._egress.begin(transfer.step, transfer.size_bytes)
        channel.in_flight[transfer.round] = transfer
        if transfer.target is None:
            transfer.ending = {server for server, _ in key.runs}
        else:
            self._missing_values += 1
        key.route.push(transfer)
        if self._steps.checkpoints.cuts:
            self._steps.checkpoints.pushed()

    # What arrives.

    def relay(self, values: Pull) -> None:
        """Expects the results of a round that only neighbours want in the transfer's target."""
        values.key.channel.relayed[values.round] = values
        self._missing_values += 1

    def add_pull(self, transfer: Pull) -> int:
        """Expects the key's value; returns the number of the request."""
        request = next(self._requests) % 2**32  # the size of its field in a header
        self._pulls[request] = transfer
        self._missing_values += 1
        return request

    def update(self, key_id: int, round: int) -> Optional[Transfer]:
        """The transfer that expects a result of this round."""
        key = self.keys.get(key_id)
        if key is None:
            return None
        push = key.channel.in_flight.get(round)
        return key.channel.relayed.get(round) if push is None or push.target is None else push

    def pull(self, request: int) -> Optional[Pull]:
        """The transfer that expects the answer to a request."""
        return self._pulls.get(request)

    @property
    def pulls(self) -> Sequence[Pull]:
        """Those whose answers are still to come."""
        return list(self._pulls.values())

    def slice_sent(self, push: Push, elems: int) -> None:
        """Count elements that a push without a result needs no more; the last complete it."""
        push.missing_elems -= elems
        if push.missing_elems == 0:
            push.done(None)

    def slice_arrived(self, transfer: Transfer, piece: Slice, header: SliceValueHeader) -> None:
        """Count a slice that is in the target; the last one completes the transfer."""
        self.counts["slices_received"] += 1
        self.counts["bytes_received"] += header.payload_bytes
        own = transfer.key.own_rounds
        if own and isinstance(transfer, Push) and isinstance(header, UpdatedHeader):
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
        """Complete a transfer, whose last frame had this header; the rest as in
        `StepTimes.value_arrived`."""
        key = transfer.key
        self._missing_values -= 1
        if isinstance(header, (PulledHeader, RowsHeader)):
            del self._pulls[header.request]
        else:
            key.filled = transfer.round, transfer.target
            if key.channel.relayed:
                key.channel.relayed.pop(transfer.round, None)
        self._times.value_arrived(transfer, late_s, server, worked_us)
        if not self._missing_values:
            self._egress.values_complete()
        transfer.done(None)
        if self._tracer.enabled:
            self._tracer.span(transfer.span(APPLIED))
        if isinstance(transfer, Push):
            if key.own_rounds:
                self.counts.note_staleness(transfer.behind)
            self._end_round(transfer, header)  # which the value tells
        elif isinstance(transfer, Pull):
            self.note_answered(transfer)

    def note_answered(self, pull: Pull) -> None:
        """Sends the pushes that have waited for a pull."""
        channel = pull.key.channel
        channel.answer(pull)
        if channel.waiting:
            self._send_waiting(channel)

    # Rounds that end.

    def take_ended(self, connection: Connection, header: EndedHeader, _: None) -> None:
        """Takes the end of a round; ProtocolError if no push expects it."""
        key = self.keys.get(header.key)
        push = None if key is None else key.channel.in_flight.get(header.round)
        if push is None or header.rank not in push.ending or header.payload_bytes:
            raise ProtocolError(
                f"it sent the end of round {header.round} of key {header.key} with "
                f"{header.payload_bytes} bytes, which nobody waits for"
            )
        if header.flags & NO_GRADIENT:
            push.check_lacking(header)
        push.ending = [server for server in push.ending if server != header.rank]
        if not push.ending:
            self._end_round(push, header)

    def _end_round(self, push: Push, header: Header) -> None:
        """A round has ended on all servers; `header` is that of the last frame that was to come."""
        key, channel = push.key, push.key.channel
        channel.end(push.round)
        if push.round > INITIAL_ROUND:
            self._steps.count_ended(push.step, key.store)
        if push.changes is not None:
            push.changes.set_result(not header.flags & NO_GRADIENT)
        if push.route is not key.direct:
            push.route.ended(push)
        if channel.waiting:
            self._send_waiting(channel)

    def _send_waiting(self, channel: Channel) -> None:
        for transfer in channel.take_admitted():
            self._send(transfer)

    # What is under way.

    def in_flight(self) -> Iterator[Push]:
        """Pushes that were sent, and whose rounds have not ended."""
        for key in self.keys.values():
            yield from key.channel.in_flight.values()

    def is_idle(self, key: WorkerKey) -> bool:
        """Whether nothing of a key is under way, and all its rounds have ended."""
        if key.size_elems == 0:
            return True  # nothing travels
        return key.channel.is_idle and not any(one.key is key for one in self._pulls.values())

    def forget(self, key_id: int) -> None:
        """Nothing of a key is exchanged any more."""
        self._positions.pop(key_id, None)

    def awaited(self) -> List[Transfer]:
        """Transfers for whose values the script may wait: pushes, the oldest first, then pulls."""
        pushes: List[Transfer] = []
        for key in self.keys.values():
            channel = key.channel
            pushes += [one for one in channel.in_flight.values() if one.target is not None]
            pushes += channel.relayed.values()
        pushes.sort(key=lambda one: one.ready_s)
        return [one for one in [*pushes, *self._pulls.values()] if one.awaited_since_s is not None]

    def awaited_since_s(self, key: WorkerKey, round: int) -> Optional[float]:
        """Since when the script may wait for a key's round, on the monotonic clock, or None."""
        found = [one for one in self.awaited() if one.key is key and one.round >= round]
        return min((one.awaited_since_s or 0.0 for one in found), default=None)

    def oldest(self) -> Optional[Tuple[Transfer, Collection[int]]]:
        """The oldest transfer that waits for values, or for its round's end, and who owes it."""
        for transfer in self.awaited():
            return transfer, transfer.route.missing(transfer)
        ending = [push for push in self.in_flight() if push.ending]
        oldest = min(ending, key=lambda one: one.ready_s, default=None)
        return None if oldest is None else (oldest, oldest.ending)

    @property
    def travels(self) -> bool:
        """Whether a transfer waits for its turn, or a push is still on its way, or its value, in
        the place of one that is done."""
        for channel in (key.channel for key in self.keys.values()):
            if channel.waiting or (channel.snapshots is not None and channel.snapshots.in_flight):
                return True
        return False

    def fail(self, error: BaseException) -> None:
        """Ends all transfers with an error."""
        pulls, self._pulls = self._pulls, {}
        for key in self.keys.values():
            key.channel.fail(error)
        for pull in pulls.values():
            pull.fail(error)
