"""Asks the servers for their optimizer's states, and gives them those that were loaded."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Dict, Iterable, List, Mapping, Optional

from p3kv.errors import ProtocolError
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import RoundHeader, StateHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import Kind
from p3kv.wire.messages import StateOutline
from p3kv.wire.states import STATE_URGENCY, ArrivingState, PlainState, queue_state
from p3kv.worker.transfers import WorkerKey


class _Request:
    """Request of this worker to servers of a key."""

    def __init__(
        self,
        kind: Kind,
        key: WorkerKey,
        round: int,
        whole: bool,
        servers: Iterable[int],
        answer: Future[Any],
        member: int = 0,
    ) -> None:
        self.kind = kind
        """The kind of the servers' answer."""
        self.key = key
        self.round = round
        self.whole = whole
        self.member = member
        self.answer = answer
        self.missing = set(servers)
        """Servers that have not begun to answer."""
        self.servers = len(self.missing)
        self.arriving: Dict[int, ArrivingState] = {}
        self.states: Dict[int, Optional[PlainState]] = {}
        """By server, also of those that have only confirmed."""


class StateRequests:
    """One key's states are under way at a time. Belongs to the worker's thread.

    Frames are sent after all slices that wait, so the servers have those first.
    """

    def __init__(self, rank: int, servers: Mapping[int, Connection]) -> None:
        self._rank = rank
        self._servers = servers
        self._requests: List[_Request] = []
        """None or one."""
        self.asking = threading.Lock()
        """To be held by whoever asks or gives, in any thread, until the answer is there."""

    def ask(
        self,
        answer: Future[Any],
        key: WorkerKey,
        round: int,
        whole: bool,
        member: int = 0,
        asks: int = 0,
    ) -> None:
        """Ask for a key's states after a round, or, by `asks`, a flag of `StateHeader`, for its
        mean gradient or the states before it; the answer has them by server. `whole`: of a whole
        tensor. `member` as in `StateHeader`."""
        servers = [server for server, _ in key.runs]
        self._begin(_Request(Kind.STATE, key, round, whole, servers, answer, member))
        flags = (StateHeader.WHOLE_TENSOR if whole else 0) | asks
        header = StateHeader(
            Kind.STATES, self._rank, flags, key=key.key_id, round=round, member=member
        )
        for server in servers:
            self._servers[server].writer.push(Frame(STATE_URGENCY, header))

    def give(
        self,
        done: Future[Any],
        key: WorkerKey,
        round: int,
        whole: bool,
        states: Mapping[int, Optional[PlainState]],
        member: int = 0,
    ) -> None:
        """Give servers their parts of a key's state, whose arrays stay as they are until `done`;
        the rest as in `ask`."""
        self._begin(_Request(Kind.LOADED, key, round, whole, states, done, member))
        for server, state in states.items():
            writer = self._servers[server].writer
            queue_state(writer, self._rank, key.key_id, round, state, whole, member)

    def fail(self, error: BaseException) -> None:
        """Ends what is under way with an error."""
        for request in self._requests:
            request.answer.set_exception(error)
        self._requests.clear()

    def take(self, connection: Connection, header: StateHeader, outline: StateOutline) -> None:
        """Takes the outline of a state."""
        request = self._expecting(header)
        request.missing.remove(header.rank)
        length = dict(request.key.runs)[header.rank]
        request.arriving[header.rank] = ArrivingState(outline, length, request.whole)
        self._end_if_arrived(header.rank, request)

    def land_bytes(self, connection: Connection, header: RoundHeader) -> Landing:
        """Lands the next bytes of a server's state."""
        request = self._requests[0] if self._requests else None
        arriving = None if request is None else request.arriving.get(header.rank)
        if request is None or arriving is None:
            raise ProtocolError("it sent bytes of an optimizer's state that it has not announced")
        return arriving.land(header), request

    def take_bytes(self, connection: Connection, header: RoundHeader, request: _Request) -> None:
        """Takes these bytes."""
        self._end_if_arrived(header.rank, request)

    def take_loaded(self, connection: Connection, header: RoundHeader, _: None) -> None:
        """Takes note that a server has its state."""
        request = self._expecting(header)
        request.missing.remove(header.rank)
        self._answered(header.rank, request, None)

    def _begin(self, request: _Request) -> None:
        assert not self._requests, "one key after the other"
        self._requests.append(request)
        self._end_if_complete(request)

    def _expecting(self, header: RoundHeader) -> _Request:
        for request in self._requests:
            asked = request.kind, request.key.key_id, request.round
            if asked == (header.kind, header.key, header.round) and header.rank in request.missing:
                return request
        raise ProtocolError(
            f"it sent a frame of kind {header.kind} for key {header.key}, round {header.round}, "
            "which nobody waits for"
        )

    def _end_if_arrived(self, server: int, request: _Request) -> None:
        if request.arriving[server].complete:
            self._answered(server, request, request.arriving.pop(server).state)

    def _answered(self, server: int, request: _Request, state: Optional[PlainState]) -> None:
        request.states[server] = state
        self._end_if_complete(request)

    def _end_if_complete(self, request: _Request) -> None:
        if len(request.states) == request.servers:
            self._requests.remove(request)
            request.answer.set_result(request.states)
