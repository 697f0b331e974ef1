"""Order in which data frames may come: one table for each direction, and one between workers.

A connection begins `NEW`. The worker says HELLO, the server CHALLENGE, and the worker PROOF: now
both know that the other belongs to the job. The server answers WELCOME when it serves. From then on
each side may say what its table allows in any order, until its BYE: first the worker, and then the
server. What a frame says of keys and rounds is checked by whoever takes it.
"""

from __future__ import annotations

from enum import Enum
from typing import Mapping, NamedTuple, Optional, Type

from p3kv.config import MAX_SLICE_ELEMS
from p3kv.errors import ProtocolError
from p3kv.wire.credentials import CHALLENGE_BYTES, HELLO_BYTES
from p3kv.wire.fields import Header, PullRowsHeader, StateHeader, ValueHeader
from p3kv.wire.header import (
    ACKNOWLEDGE,
    CARRIES,
    ENCODED,
    EXACT,
    GAPS,
    HAS_VALUE,
    IN_HOST_SUM,
    MAX_PROBE_BYTES,
    MAX_STATE_BYTES,
    NO_GRADIENT,
    WANTS_RESULT,
    Kind,
)
from p3kv.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_PROOF_BYTES,
    Checkpoint,
    CutReached,
    DataWelcome,
    DeclaredKey,
    ForwardOrder,
    LastRounds,
    Message,
    Norm,
    Resumed,
    Scale,
    SharedMemory,
    SliceSizes,
    Squares,
    Stalled,
    StateOutline,
    StepPushed,
    Vote,
    Written,
)

MAX_SLICE_BYTES = MAX_SLICE_ELEMS * 8
"""Elements have at most 8 bytes."""
MAX_ROWS_BYTES = MAX_SLICE_BYTES + 4 * MAX_SLICE_ELEMS
"""A row has an element at least, and a number of 4 bytes."""


class Phase(Enum):
    """How far one side of a connection has come."""

    NEW = "new"
    """It has not introduced itself."""
    CHALLENGED = "challenged"
    """It has, and has to prove that it belongs to the job. A server never is in this phase."""
    WAITING = "waiting"
    """It has shown that it belongs to the job. The welcome comes next."""
    OPEN = "open"
    LEFT = "left"
    """It has said that it sends nothing more."""


class Rule(NamedTuple):
    """Limits of the frames of a kind."""

    most_bytes: int = 0
    """The longest payload."""
    then: Optional[Phase] = None
    """The sender's phase after such a frame; None: as before."""
    only_rank_0: bool = False
    flags: int = 0
    """Those that a frame may have."""
    message: Optional[Type[Message]] = None
    """What the payload is; None for one that the receiver places, and reads by itself."""


def _message(
    message: Type[Message],
    then: Optional[Phase] = None,
    only_rank_0: bool = False,
    flags: int = 0,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> Rule:
    """Rule of frames that carry a message."""
    return Rule(most_bytes, then, only_rank_0, flags, message)


Rules = Mapping[Phase, Mapping[int, Rule]]
"""By the sender's phase, the kinds of frames that may come. Any other breaks the protocol."""

_OF_PUSH = (
    WANTS_RESULT | ENCODED | EXACT | ACKNOWLEDGE | NO_GRADIENT | HAS_VALUE | IN_HOST_SUM | CARRIES
)
FROM_WORKERS: Rules = {
    Phase.NEW: {Kind.HELLO: Rule(HELLO_BYTES, then=Phase.CHALLENGED)},
    Phase.CHALLENGED: {Kind.PROOF: Rule(MAX_PROOF_BYTES, then=Phase.WAITING)},
    Phase.WAITING: {},
    Phase.OPEN: {
        Kind.PUSH: Rule(MAX_SLICE_BYTES, flags=_OF_PUSH),
        Kind.PULL: Rule(flags=EXACT),
        Kind.PUSH_ROWS: Rule(
            MAX_ROWS_BYTES, flags=ENCODED | GAPS | ACKNOWLEDGE | NO_GRADIENT | IN_HOST_SUM | CARRIES
        ),
        Kind.PULL_ROWS: Rule(
            MAX_ROWS_BYTES, flags=PullRowsHeader.NAMED | PullRowsHeader.KNOWN | EXACT
        ),
        Kind.KEY: _message(DeclaredKey),
        Kind.SLICE_SIZES: _message(SliceSizes),
        Kind.OPEN: Rule(),
        Kind.PROBE: Rule(MAX_PROBE_BYTES),
        Kind.OPTIMIZER: Rule(MAX_MESSAGE_BYTES, only_rank_0=True),
        Kind.ORDER: _message(ForwardOrder, only_rank_0=True),
        Kind.STATES: Rule(flags=StateHeader.WHOLE_TENSOR | StateHeader.MEAN | StateHeader.BEFORE),
        Kind.STATE: _message(StateOutline, only_rank_0=True, flags=StateHeader.WHOLE_TENSOR),
        Kind.STATE_BYTES: Rule(MAX_STATE_BYTES, only_rank_0=True),
        Kind.CLIPPED: Rule(only_rank_0=True),
        Kind.STEP_PUSHED: _message(StepPushed, only_rank_0=True),
        Kind.SCALE: _message(Scale, only_rank_0=True),
        Kind.NORM: _message(Norm, only_rank_0=True),
        Kind.VOTE: _message(Vote),
        Kind.CHECKPOINT: _message(Checkpoint, only_rank_0=True),
        Kind.CUT: _message(CutReached),
        Kind.WRITTEN: _message(Written),
        Kind.RESUMED: _message(Resumed, only_rank_0=True),
        Kind.FORGET: Rule(),
        Kind.BYE: Rule(then=Phase.LEFT),
    },
    Phase.LEFT: {},
}
FROM_SERVERS: Rules = {
    Phase.NEW: {Kind.CHALLENGE: Rule(CHALLENGE_BYTES, then=Phase.WAITING)},
    Phase.WAITING: {
        Kind.WELCOME: _message(DataWelcome, then=Phase.OPEN, most_bytes=MAX_PROOF_BYTES)
    },
    Phase.OPEN: {
        Kind.UPDATED: Rule(MAX_SLICE_BYTES, flags=ENCODED | NO_GRADIENT),
        Kind.PULLED: Rule(MAX_SLICE_BYTES, flags=ENCODED),
        Kind.ROWS: Rule(MAX_ROWS_BYTES, flags=ENCODED | GAPS),
        Kind.ENDED: Rule(flags=NO_GRADIENT),
        Kind.SLICE_SIZES: _message(SliceSizes),
        Kind.OPEN: Rule(),
        Kind.PROBE: Rule(MAX_PROBE_BYTES),
        Kind.ORDER: _message(ForwardOrder),
        Kind.STALLED: _message(Stalled),
        Kind.STATE: _message(StateOutline, flags=StateHeader.WHOLE_TENSOR),
        Kind.STATE_BYTES: Rule(MAX_STATE_BYTES),
        Kind.LOADED: Rule(),
        Kind.SQUARES: _message(Squares),
        Kind.NORM: _message(Norm),
        Kind.VOTE: _message(Vote),
        Kind.CHECKPOINT: _message(Checkpoint),
        Kind.WRITTEN: _message(Written),
        Kind.RESUMED: _message(Resumed),
        Kind.BYE: Rule(then=Phase.LEFT),
    },
    Phase.LEFT: {},
}
FROM_NEIGHBOURS: Rules = {
    # The socket shows who it is.
    Phase.NEW: {
        Kind.MEMORY: _message(SharedMemory),
        Kind.SUMMAND: Rule(flags=WANTS_RESULT | NO_GRADIENT),
        Kind.VALUE: Rule(flags=NO_GRADIENT | ValueHeader.SUM_AS_BEFORE),
        Kind.PULL_ROWS: Rule(MAX_ROWS_BYTES, flags=PullRowsHeader.NAMED | EXACT),
        Kind.ROWS: Rule(MAX_ROWS_BYTES, flags=GAPS),
        Kind.SLICE_SIZES: _message(SliceSizes),
        Kind.BYE: _message(LastRounds, then=Phase.LEFT, flags=ACKNOWLEDGE),
    },
    Phase.LEFT: {},
}
"""From another worker of the host."""


_WHEN = {
    Phase.CHALLENGED: "before its proof",
    Phase.WAITING: "before the welcome",
    Phase.LEFT: "after its goodbye",
}


class Conversation:
    """State of one connection: what its peer has said so far, and so may say next."""

    __slots__ = ("_allowed", "_phase", "_role", "_rules", "peer")

    def __init__(self, rules: Rules, role: str) -> None:
        """`role` is the peer's."""
        self._rules = rules
        self._role = role
        self._enter(Phase.NEW)
        self.peer: Optional[int] = None
        """The peer's rank, once it is known."""

    def welcome(self) -> None:
        """Lets the peer say what its table allows, from now on."""
        assert self._phase is Phase.WAITING
        self._enter(Phase.OPEN)

    def go_on(self) -> None:
        """The peer has been welcomed over another link; it has not said more before than here."""
        if self._phase in (Phase.NEW, Phase.CHALLENGED, Phase.WAITING):
            self._enter(Phase.OPEN)

    @property
    def over(self) -> bool:
        """Whether the peer says nothing any more."""
        return self._phase is Phase.LEFT

    def hear(self, header: Header) -> Rule:
        """Takes a frame's header, and returns the rule of its kind; ProtocolError for a frame that
        must not come now."""
        if self.peer is not None and header.rank != self.peer:
            raise ProtocolError(
                f"{self._role} {self.peer} sent a frame of {self._role} {header.rank}"
            )
        rule = self._allowed.get(header.kind)
        if (
            rule is None
            or header.payload_bytes > rule.most_bytes
            or header.flags & ~rule.flags
            or (rule.only_rank_0 and header.rank != 0)
        ):
            raise ProtocolError(self._refusal(header, rule))
        if rule.then is not None:
            self._enter(rule.then)
        return rule

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._allowed = self._rules[phase]  # not looked up by phase for every frame: that is slow

    def _refusal(self, header: Header, rule: Optional[Rule]) -> str:
        if self._phase is Phase.NEW:
            return "what it sent is not p3kv's protocol"
        names = {kind.value: kind.name for kind in Kind}
        said = f"it sent a frame of kind {names.get(header.kind, header.kind)}"
        if rule is None:
            when = _WHEN.get(self._phase, f"from a {self._role} now")
            return f"{said}, which must not come {when}"
        if header.payload_bytes > rule.most_bytes:
            return f"{said} with {header.payload_bytes} bytes; it has {rule.most_bytes} at most"
        other = header.flags & ~rule.flags
        if other:
            return f"{said} with the flags {other:#04x}, which it does not have"
        return f"{said}, which only worker 0 may send"
