"""Messages between a node and the scheduler."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence, Tuple, Union

from msgspec import field
from msgspec.structs import force_setattr

from p3kv import errors
from p3kv.config import ROLES
from p3kv.errors import P3Error
from p3kv.transport import MAX_ADDRESS
from p3kv.wire.header import INITIAL_ROUND, LAST_ROUND
from p3kv.wire.messages.base import (
    MAX_RANK,
    TOKEN_BYTES,
    UNKNOWN,
    Message,
    check,
    check_choice,
    check_number,
    check_received,
    check_slice_size,
)
from p3kv.wire.messages.data import JobSettings, SliceSizes
from p3kv.wire.messages.keys import MAX_KEY_ID, MAX_STORE, DeclaredKey, DeclareKey
from p3kv.wire.messages.numbers import Lag, Numbers

MAX_REASON_CHARS = 4096


class Failure(Message, frozen=True):
    """Why the job ends: the same text in every process."""

    reason: str
    """Cause in one line."""
    role: str
    """Role and rank of the process that the failure is about."""
    rank: int
    round: int = UNKNOWN
    error: str = "PeerLostError"
    """Name of the class in p3kv.errors to raise."""
    hint: str = ""
    """Advice to the user, in whole sentences."""

    @property
    def where(self) -> str:
        """The process that the failure is about, and the round that it had reached."""
        who = self.role if self.rank == UNKNOWN else f"{self.role} {self.rank}"
        return who if self.round == UNKNOWN else f"{who} (round {self.round})"

    @property
    def words(self) -> str:
        """Reason and hint."""
        return f"{self.reason.rstrip('.')}. {self.hint}" if self.hint else self.reason

    def __post_init__(self) -> None:
        # Cut here, and not refused: whoever fails must be able to say so, whatever a peer has sent.
        for name in ("reason", "hint"):
            force_setattr(self, name, getattr(self, name)[:MAX_REASON_CHARS])
        check(self.role in ROLES, f"a failure of the role {self.role!r}")
        check_number("a rank", self.rank, UNKNOWN, MAX_RANK)
        check_number("a round", self.round, UNKNOWN, LAST_ROUND)

    def to_error(self) -> P3Error:
        """The exception that tells the user."""
        error = errors.named(self.error)(f"{self.where}: {self.words}")
        error.brief = f"{self.where}: {self.reason}"
        error.role = self.role
        error.rank = None if self.rank == UNKNOWN else self.rank
        error.round = None if self.round == UNKNOWN else self.round
        return error


MAX_HOST_CHARS = 255
MAX_BARRIER_CHARS = 256
MAX_PLACE_CHARS = 1024
MAX_AWAITED = 1000
"""Rounds of keys in one message."""
MAX_TIME_NS = 2**62


def check_place(place: str) -> None:
    """Raises ProtocolError for words of a place that are too long."""
    check(len(place) <= MAX_PLACE_CHARS, "a place in a script is too long")


def check_rounds(rounds: Sequence[Tuple[int, int]]) -> None:
    """Raises ProtocolError for rounds of keys that there can't be."""
    check(len(rounds) <= MAX_AWAITED, f"{len(rounds)} rounds of keys")
    for key_id, number in rounds:
        check_number("a key's id", key_id, 0, MAX_KEY_ID)
        check_number("a round", number, INITIAL_ROUND, LAST_ROUND)


# From a node to the scheduler.


class Hello(Message, frozen=True):
    """A process asks to be part of the job, or says on a new connection that it is still there.

    Only this message and the answer to it have no numbers (`p3kv.wire.scheduler_socket`)."""

    protocol: int
    version: str
    job: str
    role: str
    rank: Optional[int] = field(name="rank_wish")
    """The rank that the launcher states. On the wire it has an older name, so that processes of
    other versions can be told that they are of another one."""
    host: str
    port: int
    """Where a server listens, by its transport's number; 0 for a worker."""
    pid: int
    transport: str
    """By which transport workers connect to a server; empty for a worker."""
    process: bytes = b""
    """A number that the process has chosen: by it the scheduler knows it on its next connection.
    Earlier versions have none."""
    received: int = 0
    """How many messages of the scheduler it has received over connections that have ended."""
    encrypts: bool = False
    """Whether a server encrypts; of workers, `Ready` says so."""
    neighbourhood: str = ""
    """Workers with the same host and the same neighbourhood can share memory; empty: with none."""
    task: Optional[int] = None
    """The process's number among all that its launcher has started, of whatever role."""

    def __post_init__(self) -> None:
        check_choice("a transport", self.transport)
        check_number("the number of an address", self.port, 0, MAX_ADDRESS)
        check(len(self.host) <= MAX_HOST_CHARS, "a host's name is too long")
        check(len(self.neighbourhood) <= MAX_HOST_CHARS, "a neighbourhood's name is too long")
        check(len(self.process) in (0, TOKEN_BYTES), f"a token has {len(self.process)} bytes")
        check_received(self.received)


class Ready(Message, frozen=True):
    """A worker's store was created, with these settings."""

    settings: JobSettings
    place: str = ""
    """Where its script is, as in `Whereabouts`."""

    def __post_init__(self) -> None:
        check_place(self.place)


class Measured(Message, frozen=True):
    """A worker has measured the rate at which it can send; sent again when that changes much, or
    how long its steps wait."""

    rate_bytes_s: float
    """0: as it was the first time."""
    flows_bytes_s: Tuple[float, ...] = ()
    """The first time, the rate to each server while all workers sent to all."""
    waiting: float = 0.0
    """The part of its steps' time in which the worker has waited for values."""


class BarrierReached(Message, frozen=True):
    """A worker waits for all workers."""

    purpose: str = ""
    """What it does there, with all that must be the same on all workers."""
    place: str = ""
    """Where its script is, as in `Whereabouts`."""
    numbers: Tuple[Union[int, float], ...] = ()
    """What it adds to sums that all workers get."""

    def __post_init__(self) -> None:
        check_number("a sum", len(self.numbers), 0, MAX_RANK + 1)
        check(len(self.purpose) <= MAX_BARRIER_CHARS, "a barrier's purpose is too long")
        check_place(self.place)


class StoreMade(Message, frozen=True):
    """A worker has given a store an optimizer. All workers must do so alike."""

    store: int
    parameters: int
    """How many parameters the optimizer has."""
    uses: Dict[str, str]
    """What else all workers must choose alike, in words: what it is, and the choice."""
    same_names: bool = False
    """Whether parameters that have the same key must have the same name: it says their places in
    the model. All of them have been declared."""

    def __post_init__(self) -> None:
        check_number("a store's number", self.store, 0, MAX_STORE)
        check_number("a number of parameters", self.parameters, 0, MAX_KEY_ID)
        texts = [*self.uses, *self.uses.values()]
        check(all(len(text) <= MAX_BARRIER_CHARS for text in texts), "a choice is too long")


class StoreForgotten(Message, frozen=True):
    """A worker needs a store's keys no more. When all have said so, nobody does."""

    store: int

    def __post_init__(self) -> None:
        check_number("a store's number", self.store, 0, MAX_STORE)


class Whereabouts(Message, frozen=True):
    """Where a worker's script is, and what it waits for: the answer to AskWhereabouts, and sent
    unasked by a worker whose script has waited long."""

    place: str
    """File, line and text of the script's line; empty where the script has ended."""
    wait: int = 0
    """Number of the wait in which the script is; 0: in none."""
    waited_s: float = 0.0
    awaits: Tuple[Tuple[int, int], ...] = ()
    """The rounds of keys whose values it waits for, by the key's id."""
    called: str = ""
    """The first of these keys, in messages to users."""
    lacks: Tuple[Tuple[int, int], ...] = ()
    """Of the rounds that the scheduler asked for, those for which it has not pushed."""

    def __post_init__(self) -> None:
        check_place(self.place)
        check(len(self.called) <= MAX_PLACE_CHARS, "a key's name is too long")
        check_number("a wait", self.wait, 0, LAST_ROUND)
        check(0 <= self.waited_s < math.inf, f"a wait of {self.waited_s} s")
        check_rounds(self.awaits)
        check_rounds(self.lacks)


class ReportFailure(Message, frozen=True):
    """A node says that the job cannot go on."""

    failure: Failure
    second_hand: bool = False
    """The node only saw a connection end, or, where `failure` is its own, its script did; a node
    that knows the cause counts before it."""


class LinkEnded(Message, frozen=True):
    """A node's data connection to another process has ended, and it waits for a new one.

    `failure` says which process, and in which round: that process may have ended."""

    failure: Failure


class Alive(Message, frozen=True):
    """A sign of life of a node, and the scheduler's answer to it.

    It helps to tell a stopped process from an ended one, and in which round it fell silent. It
    carries what is measured, on which nothing depends.
    """

    numbers: Optional[Numbers] = None
    """What the node has measured so far."""
    slowest: Optional[Lag] = None
    """In the answer: for which worker the others wait longest."""
    round: int = UNKNOWN
    """How far the node has come."""

    def __post_init__(self) -> None:
        check_number("a round", self.round, UNKNOWN, LAST_ROUND)


class AskReports(Message, frozen=True):
    """Whoever knows the job's secret asks what its processes have measured; `p3kv top` does."""


class AskTime(Message, frozen=True):
    """A node that writes a trace asks for the scheduler's time."""

    asked_ns: int
    """The node's time, on its monotonic clock."""

    def __post_init__(self) -> None:
        check_number("a time", self.asked_ns, 0, MAX_TIME_NS)


class Bye(Message, frozen=True):
    """A node ends in order."""


# From the scheduler to a node.


class Refused(Message, frozen=True):
    """The process can't be part of the job."""

    reason: str


class Welcomed(Message, frozen=True):
    """The scheduler has registered the process and waits for the others; or knows it again."""

    received: int = 0
    """How many messages of this process it has received over connections that have ended."""

    def __post_init__(self) -> None:
        check_received(self.received)


class TimeTold(Message, frozen=True):
    """The answer to AskTime: what it said, and when the scheduler has received it and answered, on
    the scheduler's monotonic clock."""

    asked_ns: int
    received_ns: int
    sent_ns: int

    def __post_init__(self) -> None:
        for time_ns in (self.asked_ns, self.received_ns, self.sent_ns):
            check_number("a time", time_ns, 0, MAX_TIME_NS)


class Roster(Message, frozen=True):
    """All processes have arrived: the receiver's rank, and where the servers listen."""

    rank: int
    token: bytes
    servers: List[Tuple[str, int, str]]
    """Each server's host, port and transport, by rank."""
    workers: List[str]
    """The host of each worker, by rank."""
    neighbours: Tuple[int, ...] = ()
    """Ranks of the workers that can share memory with the receiver, a worker, and its own."""
    pids: Tuple[int, ...] = ()
    """Their process ids."""

    def __post_init__(self) -> None:
        check_number("a rank", self.rank, 0, MAX_RANK)
        for rank in self.neighbours:
            check_number("a rank", rank, 0, MAX_RANK)
        check(len(self.token) == TOKEN_BYTES, f"a token has {len(self.token)} bytes")


class Agreed(Message, frozen=True):
    """Every worker's store has been created, with the same settings."""


class FirstSliceSize(Message, frozen=True, tag="SliceSize"):  # the protocol's name
    """All workers have measured; slices have at most this many elements."""

    slice_size: int

    def __post_init__(self) -> None:
        check_slice_size(self.slice_size)


class NewSliceSizes(Message, frozen=True, tag="NewTerms"):  # the protocol's names
    """Worker rank 0 is to announce these slice sizes from a coming round on."""

    sizes: SliceSizes = field(name="terms")


class KeyRefused(Message, frozen=True):
    """The answer to a DeclareKey that contradicts another worker's."""

    reason: str


class AskWhereabouts(Message, frozen=True):
    """The scheduler asks a worker where its script is, and for which of these rounds of keys it has
    not pushed."""

    asks: Tuple[Tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_rounds(self.asks)


class CallAwaited(Message, frozen=True):
    """Workers wait in a call that all must make, and others have not made it."""

    words: str


class BarrierPassed(Message, frozen=True):
    """All workers have reached the barrier."""

    totals: Tuple[Union[int, float], ...] = ()
    """The sums of their numbers, in the order of ranks, where they have brought some. Of integers
    it is one, unless that has more than 64 bits."""


class Abort(Message, frozen=True):
    """The job ends because of this."""

    failure: Failure


class PeerSilent(Message, frozen=True):
    """A process of the job has not answered for some time, or answers again."""

    who: str
    silent_s: float
    timeout_s: float
    """The job ends when it has been silent for so long."""
    answers: bool = False


class ProcessReport(Message, frozen=True):
    """Measurements of a process, as it has said last."""

    role: str
    rank: int
    host: str
    gone: bool
    numbers: Optional[Numbers]


class Reports(Message, frozen=True):
    """The answer to AskReports."""

    processes: List[ProcessReport]


class WorkersMayLeave(Message, frozen=True):
    """Scripts get a signal to end, each in whatever step it is: rounds go on without those that
    leave, as P3KV_LET_WORKERS_LEAVE has it."""


class Finished(Message, frozen=True):
    """All workers are done: servers may end."""


ToScheduler = Union[
    Hello,
    Ready,
    Measured,
    DeclareKey,
    BarrierReached,
    StoreMade,
    StoreForgotten,
    Whereabouts,
    ReportFailure,
    LinkEnded,
    Alive,
    AskReports,
    AskTime,
    Bye,
]
FromScheduler = Union[
    Alive,
    TimeTold,
    Refused,
    Welcomed,
    Roster,
    Agreed,
    FirstSliceSize,
    NewSliceSizes,
    DeclaredKey,
    KeyRefused,
    BarrierPassed,
    AskWhereabouts,
    CallAwaited,
    Reports,
    PeerSilent,
    Abort,
    WorkersMayLeave,
    Finished,
]
