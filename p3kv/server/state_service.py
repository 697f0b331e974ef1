"""Gives workers the optimizer's states of keys, and takes those that worker rank 0 has loaded."""

from __future__ import annotations

import logging
from typing import Any, Dict, NamedTuple, Optional

from p3kv.errors import ProtocolError, in_one_line
from p3kv.server.engine import Engine, ServerKey
from p3kv.server.optimizer import State
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection, Landing
from p3kv.wire.fields import RoundHeader, StateHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, URGENT, Kind
from p3kv.wire.messages import UNKNOWN, StateOutline
from p3kv.wire.states import LACKING, MEAN, ArrivingState, PlainState, queue_state

_log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """Work on a key's states when a round has ended for all its slices."""

    connection: Connection
    header: Any
    """That of STATES, or of the state's last frame."""
    key: ServerKey
    arrived: Optional[ArrivingState]
    """A state to take; None: one is to be given."""


class StateService:
    """Copies and replaces the states of whole keys, each between two rounds.

    Workers know nothing of slices here: a server joins the states of its slices, and cuts what it
    gets. A worker asks for one key after the other. Belongs to the server's thread.
    """

    def __init__(self, engine: Engine, workers: Workers) -> None:
        self._rank = engine.state.rank
        self._engine = engine
        self._workers = workers
        self.waiting: Dict[int, _Waiting] = {}
        """By the rank of the worker that waits."""
        self._arriving: Optional[ArrivingState] = None

    def ask(self, connection: Connection, header: StateHeader, _: None) -> None:
        """Sends a worker the state of a key, when the round has ended for which it asks."""
        self._when_ended(_Waiting(connection, header, self._key(header), None))

    def take(self, connection: Connection, header: StateHeader, outline: StateOutline) -> None:
        """Takes the outline of a state that worker rank 0 gives."""
        key = self._key(header, header.round)
        if self._arriving is not None:
            raise ProtocolError("it sent an optimizer's state before the last one was complete")
        _check_member(header, key)
        kept_elems = key.plan.kept_elems
        self._arriving = ArrivingState(outline, kept_elems, _whole(header), header.member)
        self._take_if_complete(connection, header, key)

    def land_bytes(self, connection: Connection, header: RoundHeader) -> Landing:
        """Lands the next bytes of this state."""
        key = self._key(header, header.round)
        if self._arriving is None:
            raise ProtocolError("it sent bytes of an optimizer's state that it has not announced")
        return self._arriving.land(header), key

    def take_bytes(self, connection: Connection, header: RoundHeader, key: ServerKey) -> None:
        """Takes these bytes."""
        self._take_if_complete(connection, header, key)

    def round_ended(self, key: ServerKey) -> None:
        """To be called when a slice of a key has ended a round, and something is waiting."""
        for rank, waiting in list(self.waiting.items()):
            if waiting.key is key and _is_there(waiting):
                del self.waiting[rank]
                self._act(waiting)

    def _key(self, header: RoundHeader, gives_for: int = UNKNOWN) -> ServerKey:
        """The key of a state that a worker asks for, or that rank 0 gives for a round: slices have
        the initial one in common at least, before workers begin to push."""
        key = self._engine.key(header.key, header.rank)
        if key.plan.own_rounds and gives_for != INITIAL_ROUND:
            raise ProtocolError(
                f"it asked for states of {key.plan.called}, whose slices have no round in common"
            )
        return key

    def _when_ended(self, waiting: _Waiting) -> None:
        header, key = waiting.header, waiting.key
        if header.rank in self.waiting:
            raise ProtocolError("it asked for a state before it had the last one")
        key.check_ahead(header.round, header.rank)  # or no round so far ahead would ever end
        if _is_there(waiting):
            self._act(waiting)
        else:
            self.waiting[header.rank] = waiting

    def _act(self, waiting: _Waiting) -> None:
        connection, header, key, arrived = waiting
        if arrived is None:
            self._give(connection, header, key)
        else:
            self._replace(connection, header, key, arrived)

    def _give(self, connection: Connection, header: StateHeader, key: ServerKey) -> None:
        if connection.closed:
            return
        whole = _whole(header)
        if _asks_mean(header):
            mean, lacking = key.copied_mean(header.round)
            plain: Optional[PlainState] = PlainState(
                {} if mean is None else {MEAN: mean}, {LACKING: lacking}
            )
        else:
            _check_member(header, key)
            optimizer = key.plan.optimizer
            before = header.round if header.flags & header.BEFORE else None
            state = None
            if optimizer is not None:
                state = key.copied_state(optimizer, whole, header.member, before)
            plain = None if state is None else PlainState(state.elements, state.numbers)
        queue_state(
            connection.writer, self._rank, header.key, header.round, plain, whole, header.member
        )

    def _take_if_complete(
        self, connection: Connection, header: RoundHeader, key: ServerKey
    ) -> None:
        assert self._arriving is not None
        if self._arriving.complete:
            arrived, self._arriving = self._arriving, None
            self._when_ended(_Waiting(connection, header, key, arrived))

    def _replace(
        self, connection: Connection, header: RoundHeader, key: ServerKey, arrived: ArrivingState
    ) -> None:
        plain = arrived.state
        state = None if plain is None else State(dict(plain.elements), dict(plain.numbers))
        try:
            optimizer = key.plan.optimizer
            if optimizer is None:
                raise ProtocolError("it sent an optimizer's state, and there is no optimizer")
            key.replace_state(optimizer, state, arrived.whole, arrived.member)
        except ProtocolError as error:
            # Not raised: another worker's push may have brought this about.
            self._workers.lose(connection, str(error))
            return
        except Exception as error:  # noqa: BLE001  the optimizer's own
            _log.exception("the optimizer can't take a state")
            self._workers.fail(
                f"the optimizer can't take a state: {in_one_line(error)}", header.round
            )
            return
        loaded = RoundHeader(Kind.LOADED, self._rank, key=header.key, round=header.round)
        connection.writer.push(Frame(URGENT, loaded))


def _check_member(header: StateHeader, key: ServerKey) -> None:
    """Raises ProtocolError where the tensor of which a state is does not fit the key."""
    tensors = len(key.declared.members)
    if header.member > tensors or (tensors and not header.member) or (tensors and _whole(header)):
        raise ProtocolError(
            f"it speaks of the state of tensor {header.member} of {key.plan.called}, which has "
            f"{tensors}"
        )


def _is_there(waiting: _Waiting) -> bool:
    """Whether the round has ended; of a mean, whether that is known."""
    key, header = waiting.key, waiting.header
    if waiting.arrived is None and _asks_mean(header):
        return key.has_mean(header.round)
    return key.has_ended(header.round)


def _asks_mean(header: StateHeader) -> bool:
    return bool(header.flags & header.MEAN)


def _whole(header: StateHeader) -> bool:
    return bool(header.flags & header.WHOLE_TENSOR)
