"""What the scheduler knows and decides, without any input or output."""

from __future__ import annotations

import hmac
import math
import secrets
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

import msgspec

from p3kv.errors import ProtocolError
from p3kv.scheduler.blame import LEFT, NEVER_JOINED, WITHOUT_LEAVING, Blame
from p3kv.slicing import Run, check_count, loads_with, place, slice_size_for
from p3kv.wire.control import SILENT_S
from p3kv.wire.launcher_link import PartEnded
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    UNKNOWN,
    Abort,
    Agreed,
    Alive,
    BarrierPassed,
    BarrierReached,
    Bye,
    DeclareKey,
    Failure,
    Finished,
    FromScheduler,
    Hello,
    Key,
    KeyDeclared,
    KeyRefused,
    Measured,
    NewSliceSize,
    Ready,
    Refused,
    ReportFailure,
    Roster,
    SliceSize,
    ToScheduler,
    Welcomed,
    called,
)

Replies = List[Tuple[bytes, FromScheduler]]
"""Messages to send, each with the identity of the node that gets it."""


_WORTH_A_CHANGE = 4
"""Another size of slices is worth its trouble from this factor on: half or twice is as good on a
link."""
_MISMEASURED = 1.4
"""It must be worth it also where the network was this factor faster or slower than measured, or the
size could change again and again."""


@dataclass
class Node:
    """A process that belongs to the job."""

    identity: bytes
    hello: Hello
    arrival: int
    rank: int = UNKNOWN
    ready: Optional[Ready] = None
    rate_bytes_s: Optional[float] = None
    at_barrier: bool = False
    gone: bool = False

    def name(self) -> str:
        """How messages call this node."""
        rank = "" if self.rank == UNKNOWN else f" {self.rank}"
        return f"{self.hello.role}{rank} ({self.place()})"

    def place(self) -> str:
        """Where it runs."""
        return f"{self.hello.host}, process {self.hello.pid}"


@dataclass
class _DeclaredKey:
    key_id: int
    runs: List[Run]
    message: DeclareKey
    ranks: Set[int] = field(default_factory=set)


class Job:
    """The state of one job: `handle` takes a message and returns what to send.

    Ranks go by the nodes' wishes, then by arrival. `failure` is set once and says why the job
    ends; `ended` is true when nobody is left.
    """

    def __init__(self, name: str, num_workers: int, num_servers: int) -> None:
        self.failure: Optional[Failure] = None
        self._name = name
        self._wanted = {"worker": num_workers, "server": num_servers}
        self._nodes: Dict[bytes, Node] = {}
        self._keys: Dict[Key, _DeclaredKey] = {}
        self._slice_size: Optional[int] = None
        self._loads_elems = [0] * num_servers
        self._assembled = False
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._blame = Blame()
        self._lost: List[Tuple[Node, float]] = []
        self._silent: List[str] = []
        self._ends: List[PartEnded] = []

    @property
    def assembled(self) -> bool:
        """Whether everybody has arrived."""
        return self._assembled

    @property
    def ended(self) -> bool:
        """Whether nobody is left that the scheduler should wait for."""
        everybody_came = self._assembled or self.failure is not None
        gone = everybody_came and all(node.gone for node in self._nodes.values())
        return gone and not self.undecided

    @property
    def undecided(self) -> bool:
        """Whether something was seen that may end the job, and others may know more of it."""
        return self.failure is None and bool(self._blame or self._lost or self._ends)

    def node(self, identity: bytes) -> Optional[Node]:
        """The node with this identity, if it belongs to the job."""
        return self._nodes.get(identity)

    def handle(self, identity: bytes, message: ToScheduler) -> Replies:
        """Takes a message; returns what to send, and to whom."""
        if isinstance(message, Hello):
            return self._hello(identity, message)
        node = self._nodes.get(identity)
        if node is None:
            return [(identity, Refused("say Hello first"))]
        if isinstance(message, Bye):
            return self._bye(node)
        if isinstance(message, ReportFailure):
            failure = message.failure
            if failure.rank == UNKNOWN and failure.role == node.hello.role:
                failure = msgspec.structs.replace(failure, rank=self._rank(node))
            if not message.second_hand:
                return self.fail(failure)
            self._blame.lost(failure, self._called(node))
            return []
        if isinstance(message, Alive):
            return [(identity, message)]
        if self.failure is not None:
            return [(identity, Abort(self.failure))]
        if not self._in_turn(node, message):
            reason = f"it sent {type(message).__name__} out of turn ({node.name()})."
            rank = self._rank(node)
            return self.fail(Failure(reason, node.hello.role, rank, error="ProtocolError"))
        if isinstance(message, Ready):
            return self._ready(node, message)
        if isinstance(message, Measured):
            return self._measured(node, message)
        if isinstance(message, DeclareKey):
            return self._declare(node, message)
        assert isinstance(message, BarrierReached)
        return self._barrier(node)

    def fail(self, failure: Failure) -> Replies:
        """Ends the job because of `failure`, unless it ends for another reason already."""
        if self.failure is None:
            self.failure = failure
        for lost, _ in self._lost:
            lost.gone = True
        self._lost.clear()
        return [(n.identity, Abort(self.failure)) for n in self._nodes.values() if not n.gone]

    def wrong_words(self, node: Node, error: ProtocolError) -> Replies:
        """Ends the job because a node sent what is no message of the protocol."""
        reason = f"{error} ({node.name()})"
        return self.fail(Failure(reason, node.hello.role, self._rank(node), error="ProtocolError"))

    def lost(self, node: Node, silent_s: float) -> None:
        """Takes note that a node's connection ended without a Bye, and when it was last heard of.

        `judge` decides what that means: its last words may still be on their way.
        """
        if self.failure is not None:
            node.gone = True
        elif not node.gone:
            self._lost.append((node, silent_s))

    def process_ended(self, end: PartEnded) -> None:
        """Takes note that the launcher has seen a process end; `judge` decides what that means."""
        node = self._ranked(end.role, end.rank)
        if self.failure is None and not (node is not None and node.gone and end.code == 0):
            self._ends.append(end)

    def judge(self) -> Replies:
        """Decides whether the job ends, and why, once all witnesses have had time to speak."""
        if self.failure is not None:
            return []
        for lost, silent_s in self._lost:
            if not lost.gone:
                self._blame.disconnected(lost.hello.role, self._rank(lost), lost.place(), silent_s)
                if silent_s >= SILENT_S:
                    self._silent.append(self._called(lost))
        for end in self._ends:
            node = self._ranked(end.role, end.rank)
            if node is None:
                if not self._assembled:
                    self._blame.ended(end, NEVER_JOINED)
            elif not node.gone:
                node.gone = True
                self._blame.ended(end, WITHOUT_LEAVING if end.code == 0 else "")
            elif end.code != 0:
                self._blame.ended(end, LEFT)
        self._ends.clear()
        if self._blame:
            return self.fail(self._blame.verdict())
        self._lost.clear()
        return []

    def unreached(self) -> List[str]:
        """Those that can't be told of a failure: they have not joined, or do not answer."""
        missing = [f"{role} {rank}" for role in self._wanted for rank in self._missing(role)]
        return missing + self._silent

    def who_came(self) -> str:
        """Who is missing, and who has come from where, to tell people who start processes."""
        came, missing = [], []
        by_host: Dict[str, List[str]] = {}
        for role, wanted in self._wanted.items():
            nodes = self._role(role)
            came.append(f"{len(nodes)} of {wanted} {role}s")
            ranks = self._missing(role)
            if ranks and nodes:
                missing += [f"{role} {rank}" for rank in ranks]
            elif len(nodes) < wanted:
                missing.append(f"{wanted - len(nodes)} {role}s")
            for node in nodes:
                by_host.setdefault(node.hello.host, []).append(self._called(node))
        places = "; ".join(f"{host}: {', '.join(names)}" for host, names in by_host.items())
        return (
            f"waiting for {', '.join(missing)}; {' and '.join(came)} have come"
            f"{f' ({places})' if places else ''}. "
            "A worker has come once its script does 'import p3kv'."
        )

    def nobody_else_came(self, waited_s: float) -> Replies:
        """Ends the job because some did not arrive."""
        counts = []
        for role, wanted in self._wanted.items():
            nodes = self._role(role)
            ranks = ", ".join(map(str, self._missing(role) if nodes else []))
            missing = f" ({role} {ranks} missing)" if ranks else ""
            counts.append(f"{len(nodes)} of {wanted} {role}s arrived{missing}")
        failure = Failure(
            f"{' and '.join(counts)}, and nobody else came for {waited_s:g} s",
            "scheduler",
            UNKNOWN,
            error="RendezvousError",
            hint="Start as many processes as DMLC_NUM_WORKER and DMLC_NUM_SERVER say, look at the "
            "output of those that are missing, or let the others wait longer with "
            "P3KV_RENDEZVOUS_TIMEOUT_S.",
        )
        return self.fail(failure)

    def _in_turn(self, node: Node, message: ToScheduler) -> bool:
        """Whether the node may send such a message now."""
        if node.hello.role != "worker" or isinstance(message, Ready) == (node.ready is not None):
            return False
        if isinstance(message, Measured):
            in_turn = (self._slice_size is None) == (node.rate_bytes_s is None)
            return in_turn and 0 <= message.rate_bytes_s < math.inf
        return not isinstance(message, DeclareKey) or self._slice_size is not None

    def _role(self, role: str) -> List[Node]:
        nodes = [node for node in self._nodes.values() if node.hello.role == role]
        return sorted(nodes, key=lambda node: node.rank)

    def _missing(self, role: str) -> List[int]:
        """Ranks that nobody has wished for, if all who came have a wish; else nobody can tell."""
        came = [self._rank(node) for node in self._role(role)]
        if UNKNOWN in came or len(set(came)) < len(came):
            return []
        return [rank for rank in range(self._wanted[role]) if rank not in came]

    def _ranked(self, role: str, rank: int) -> Optional[Node]:
        return next((node for node in self._role(role) if self._rank(node) == rank), None)

    def _called(self, node: Node) -> str:
        rank = self._rank(node)
        return f"{node.hello.role} {rank}" if rank != UNKNOWN else node.hello.role

    def _rank(self, node: Node) -> int:
        """The node's rank; while ranks are not given yet, the one that it wishes for."""
        wish = node.hello.rank_wish
        if node.rank == UNKNOWN and wish is not None and 0 <= wish < self._wanted[node.hello.role]:
            return wish
        return node.rank

    def _hello(self, identity: bytes, hello: Hello) -> Replies:
        reason = None
        if hello.protocol != PROTOCOL_VERSION:
            reason = (
                f"this job speaks protocol {PROTOCOL_VERSION}, the {hello.role} at {hello.host} "
                f"speaks {hello.protocol} (p3kv {hello.version}); install the same p3kv everywhere"
            )
        elif not hmac.compare_digest(_as_bytes(hello.job), _as_bytes(self._name)):
            # Whoever knows a job's name gets its token: names are never told.
            reason = (
                "the scheduler at this address runs another job; give each job a port of its own "
                "(DMLC_PS_ROOT_PORT) and all its processes the same P3KV_JOB, DMLC_NUM_WORKER and "
                "DMLC_NUM_SERVER"
            )
        elif hello.role not in self._wanted:
            reason = f"there is no role '{hello.role}'"
        elif identity in self._nodes:
            reason = "this process has said Hello before"
        elif len(self._role(hello.role)) >= self._wanted[hello.role]:
            reason = (
                f"all {self._wanted[hello.role]} {hello.role}s of the job have arrived already; "
                "is a process of an earlier run still there, or is the number too small?"
            )
        if reason is not None:
            return [(identity, Refused(reason))]
        self._nodes[identity] = Node(identity, hello, arrival=len(self._nodes))
        replies: Replies = [(identity, Welcomed())]
        if self.failure is not None:
            return [*replies, (identity, Abort(self.failure))]
        if all(len(self._role(role)) == wanted for role, wanted in self._wanted.items()):
            replies += self._assemble()
        if self._over:
            replies += self._finish()
        return replies

    def _assemble(self) -> Replies:
        self._assembled = True
        for role in self._wanted:
            nodes = self._role(role)
            nodes.sort(key=lambda n: (n.hello.rank_wish is None, n.hello.rank_wish or 0, n.arrival))
            for rank, node in enumerate(nodes):
                node.rank = rank
        servers = [(node.hello.host, node.hello.port) for node in self._role("server")]
        workers = [node.name() for node in self._role("worker")]
        return [
            (node.identity, Roster(node.rank, self._token, servers, workers))
            for node in self._nodes.values()
        ]

    def _ready(self, node: Node, message: Ready) -> Replies:
        node.ready = message
        workers = self._role("worker")
        for other in workers:
            if other.ready is not None and other.ready != message:
                return self.fail(
                    Failure(
                        f"{node.name()} has {message}, {other.name()} has {other.ready}",
                        "worker",
                        node.rank,
                        error="ConfigError",
                        hint="Set p3kv.configure or the P3KV_* variables the same on all workers.",
                    )
                )
        if not all(worker.ready is not None for worker in workers):
            return self._check_nobody_is_missed()
        self._slice_size = message.slice_size
        agreed = Agreed(message.slice_size, message.deterministic)
        return [(worker.identity, agreed) for worker in workers]

    def _measured(self, node: Node, message: Measured) -> Replies:
        node.rate_bytes_s = message.rate_bytes_s
        workers = self._role("worker")
        rates = [w.rate_bytes_s for w in workers if w.rate_bytes_s is not None]
        if len(rates) < len(workers):
            return self._check_nobody_is_missed()
        # Everybody waits for the slowest.
        slice_size = slice_size_for(min(rates), self._wanted["server"])
        if self._slice_size is None:
            self._slice_size = slice_size
            return [(worker.identity, SliceSize(slice_size)) for worker in workers]
        for off in (_MISMEASURED, 1 / _MISMEASURED):
            perhaps = slice_size_for(off * min(rates), self._wanted["server"])
            if max(perhaps / self._slice_size, self._slice_size / perhaps) < _WORTH_A_CHANGE:
                return []
        self._slice_size = slice_size
        return [(workers[0].identity, NewSliceSize(slice_size))]

    def _declare(self, node: Node, message: DeclareKey) -> Replies:
        declared = self._keys.get(message.key)
        if declared is None:
            try:
                declared = self._place(message)
            except ProtocolError as error:
                return self._refuse_key(node, f"key {message.key!r}: {error}")
        if node.rank in declared.ranks:
            return self._refuse_key(
                node,
                f"{called(message.key, message.name)} was declared before by worker {node.rank}",
            )
        first = declared.message
        if (first.shape, first.dtype) != (message.shape, message.dtype):
            other = min(declared.ranks)
            reason = (
                f"workers disagree on {called(message.key, first.name)}: worker {other} has shape "
                f"{first.shape} and dtype {first.dtype}, worker {node.rank} has shape "
                f"{message.shape} and dtype {message.dtype}"
            )
            hint = "All workers must build the same model with the same parameter names."
            return self._refuse_key(node, reason, hint)
        declared.ranks.add(node.rank)
        return [(node.identity, KeyDeclared(declared.key_id, declared.runs, first.name))]

    def _place(self, message: DeclareKey) -> _DeclaredKey:
        assert self._slice_size is not None
        check_count([(0, math.prod(message.shape))], self._slice_size)
        runs = place(math.prod(message.shape), self._slice_size, self._loads_elems)
        self._loads_elems = loads_with(self._loads_elems, runs)
        declared = _DeclaredKey(len(self._keys), runs, message)
        self._keys[message.key] = declared
        return declared

    def _refuse_key(self, node: Node, reason: str, hint: str = "") -> Replies:
        failure = Failure(reason, "worker", node.rank, error="KeyMismatchError", hint=hint)
        return [(node.identity, KeyRefused(failure.words)), *self.fail(failure)]

    def _barrier(self, node: Node) -> Replies:
        node.at_barrier = True
        workers = self._role("worker")
        if not all(worker.at_barrier for worker in workers):
            return self._check_nobody_is_missed()
        for worker in workers:
            worker.at_barrier = False
        return [(worker.identity, BarrierPassed()) for worker in workers]

    def _bye(self, node: Node) -> Replies:
        node.gone = True
        if self.failure is not None:
            return []
        if self._over:
            return self._finish()
        workers = self._role("worker")
        others_need_it = node.ready is None and any(w.ready is not None for w in workers)
        if node.hello.role == "server" or others_need_it:
            return self._left_early(node)
        return self._check_nobody_is_missed()

    @property
    def _over(self) -> bool:
        """Whether all workers have come and gone."""
        return self._assembled and all(worker.gone for worker in self._role("worker"))

    def _finish(self) -> Replies:
        """Lets the servers go."""
        return [(s.identity, Finished()) for s in self._role("server") if not s.gone]

    def _left_early(self, node: Node) -> Replies:
        return self.fail(
            Failure(
                f"the process ended while others still needed it ({node.place()})",
                node.hello.role,
                self._rank(node),
                hint="Each process must stay until all workers are done, and each worker must "
                "create its store and reach as many barriers as the others; its own output may say "
                "more.",
            )
        )

    def _check_nobody_is_missed(self) -> Replies:
        """A worker may end before the others, but not while they wait for it."""
        workers = self._role("worker")
        starting = any(w.ready is not None for w in workers) and any(
            w.ready is None for w in workers
        )
        measuring = self._slice_size is None and any(w.rate_bytes_s is not None for w in workers)
        waiting = starting or measuring or any(w.at_barrier for w in workers)
        for worker in workers:
            if waiting and worker.gone and not (starting and worker.ready is not None):
                return self._left_early(worker)
        return []


def _as_bytes(name: str) -> bytes:
    """For a comparison whose time tells nothing; a name from the environment may be no text."""
    return name.encode(errors="surrogateescape")
