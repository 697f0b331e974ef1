"""Who belongs to the job: arrival, ranks, who has left and who is missing; and what they get."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from p3kv.common.words import counted
from p3kv.config.ranks import Variables, out_of_range, taken, task_taken
from p3kv.slicing import Topology
from p3kv.wire.messages import (
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    UNKNOWN,
    Failure,
    Finished,
    FromScheduler,
    Hello,
    Roster,
)

Replies = List[Tuple[bytes, FromScheduler]]
"""Messages to send, each with the identity of the node that gets it."""


class JobFails(Exception):
    """Raised when a message makes the job fail; `Job` then tells all nodes, after `first`."""

    def __init__(self, failure: Failure, *first: Tuple[bytes, FromScheduler]) -> None:
        super().__init__(failure.words)
        self.failure = failure
        self.first: Replies = list(first)

    @classmethod
    def at(cls, node: Node, reason: str, error: str, hint: str = "") -> JobFails:
        """The end of a job by a mistake of a worker's script or settings."""
        return cls(Failure(reason, "worker", node.rank, error=error, hint=hint))


@dataclass
class Node:
    """A process that belongs to the job."""

    identity: bytes
    hello: Hello
    arrival: int
    rank: int = UNKNOWN
    gone: bool = False
    round: int = UNKNOWN
    """How far it had come when it last gave a sign of life."""

    def name(self) -> str:
        """The node's name in messages."""
        rank = "" if self.rank == UNKNOWN else f" {self.rank}"
        return f"{self.hello.role}{rank} ({self.place()})"

    def place(self) -> str:
        """The host and process id of the node."""
        return f"{self.hello.host}, process {self.hello.pid}"


class Membership:
    """The nodes of one job. A node gets the rank that its launcher states; the free ranks go to the
    others by their launchers' numbers, then by arrival."""

    def __init__(self, job: str, num_workers: int, num_servers: int, variables: Variables) -> None:
        self._job = job
        self._variables = variables
        self._wanted = {"worker": num_workers, "server": num_servers}
        self._nodes: Dict[bytes, Node] = {}
        self._assembled = False
        self._token = secrets.token_bytes(TOKEN_BYTES)

    # Coming and going.

    def admit(self, identity: bytes, hello: Hello) -> Optional[str]:
        """Adds a node to the job; returns the reason if it can't be part of the job."""
        reason = self._reason_to_refuse(identity, hello)
        if reason is None:
            self._nodes[identity] = Node(identity, hello, arrival=len(self._nodes))
        return reason

    def assemble(self) -> Replies:
        """Give ranks and tell all nodes, if all have arrived."""
        if any(len(self.role(role)) < wanted for role, wanted in self._wanted.items()):
            return []
        self._assembled = True
        for role in self._wanted:
            nodes = self.role(role)
            stated = {node.hello.rank for node in nodes}
            free = iter([rank for rank in range(len(nodes)) if rank not in stated])
            for node in sorted(nodes, key=_turn):
                node.rank = next(free) if node.hello.rank is None else node.hello.rank
        servers = [
            (node.hello.host, node.hello.port, node.hello.transport) for node in self.role("server")
        ]
        workers = [node.hello.host for node in self.workers]
        replies: Replies = []
        for node in self._nodes.values():
            near = self.neighbours(node)
            pids = tuple(self.workers[rank].hello.pid for rank in near)
            roster = Roster(node.rank, self._token, servers, workers, near, pids)
            replies.append((node.identity, roster))
        return replies

    def left(self, node: Node) -> None:
        """The node sends nothing more, and is told nothing more."""
        node.gone = True

    @property
    def assembled(self) -> bool:
        """Whether all processes have arrived."""
        return self._assembled

    @property
    def all_left(self) -> bool:
        """Whether all nodes that came have left."""
        return all(node.gone for node in self._nodes.values())

    @property
    def workers_left(self) -> bool:
        """Whether all workers have come and gone."""
        return self._assembled and all(worker.gone for worker in self.workers)

    def let_servers_go(self) -> Replies:
        """Tells servers that they may end, if all workers have left."""
        if not self.workers_left:
            return []
        return self.tell_servers(Finished())

    def tell_servers(self, message: FromScheduler) -> Replies:
        """Tells all servers that are left."""
        return [(server.identity, message) for server in self.role("server") if not server.gone]

    # Who is who.

    @property
    def present(self) -> List[Node]:
        """All nodes that came and have not left."""
        return [node for node in self._nodes.values() if not node.gone]

    @property
    def workers(self) -> List[Node]:
        """The workers that came, by rank."""
        return self.role("worker")

    def neighbours(self, node: Node) -> Tuple[int, ...]:
        """Ranks of the workers that can share memory with a worker, and its own."""
        mine = node.hello
        if mine.role != "worker" or not mine.neighbourhood:
            return ()
        return tuple(
            other.rank
            for other in self.workers
            if (other.hello.host, other.hello.neighbourhood) == (mine.host, mine.neighbourhood)
        )

    def role(self, role: str) -> List[Node]:
        """The nodes of a role that came, by rank."""
        nodes = [node for node in self._nodes.values() if node.hello.role == role]
        return sorted(nodes, key=lambda node: node.rank)

    def hosts(self, neighbours_as_one: bool) -> Topology:
        """Hosts of servers and workers; with `neighbours_as_one`, workers that send one sum are
        one."""
        workers = self.workers
        if neighbours_as_one:
            workers = [one for one in workers if self.neighbours(one)[:1] in ((), (one.rank,))]
        servers = tuple(server.hello.host for server in self.role("server"))
        return Topology(servers, tuple(worker.hello.host for worker in workers))

    def node(self, identity: bytes) -> Optional[Node]:
        """The node with this identity, if it belongs to the job."""
        return self._nodes.get(identity)

    def ranked(self, role: str, rank: int) -> Optional[Node]:
        """The node that has this rank, if it came."""
        return next((node for node in self.role(role) if self.rank_of(node) == rank), None)

    def rank_of(self, node: Node) -> int:
        """The node's rank; before ranks are given, the one that its launcher states."""
        stated = node.hello.rank
        return stated if node.rank == UNKNOWN and stated is not None else node.rank

    def called(self, node: Node) -> str:
        """The node's role and rank, as far as that is known."""
        rank = self.rank_of(node)
        return f"{node.hello.role} {rank}" if rank != UNKNOWN else node.hello.role

    # Who is missing.

    def missing(self) -> List[str]:
        """Role and rank of the processes that have not come, as far as they are known."""
        return [f"{role} {rank}" for role in self._wanted for rank in self._missing(role)]

    def who_came(self) -> str:
        """Say who is missing and which hosts the others are on, for people who start them."""
        came, missing = [], []
        by_host: Dict[str, List[str]] = {}
        for role, wanted in self._wanted.items():
            nodes = self.role(role)
            came.append(f"{len(nodes)} of {counted(wanted, role)}")
            ranks = self._missing(role)
            if ranks and nodes:
                missing += [f"{role} {rank}" for rank in ranks]
            elif len(nodes) < wanted:
                missing.append(counted(wanted - len(nodes), role))
            for node in nodes:
                by_host.setdefault(node.hello.host, []).append(self.called(node))
        places = "; ".join(f"{host}: {', '.join(names)}" for host, names in by_host.items())
        advice = (
            " A worker has come once its script does 'import p3kv': make that its first import, or "
            "start the script as 'p3kv run train.py'."
        )
        return (
            f"waiting for {', '.join(missing)}; {' and '.join(came)} have come"
            f"{f' ({places})' if places else ''}."
            f"{advice if len(self.workers) < self._wanted['worker'] else ''}"
        )

    def nobody_else_came(self, waited_s: float) -> Failure:
        """Why the job ends if some processes did not arrive."""
        counts = []
        for role, wanted in self._wanted.items():
            nodes = self.role(role)
            ranks = ", ".join(map(str, self._missing(role) if nodes else []))
            missing = f" ({role} {ranks} missing)" if ranks else ""
            counts.append(f"{len(nodes)} of {counted(wanted, role)} arrived{missing}")
        return Failure(
            f"{' and '.join(counts)}, and nobody else came for {waited_s:g} s",
            "scheduler",
            UNKNOWN,
            error="RendezvousError",
            hint="Start as many processes as stated in "
            f"{' and '.join(self._variables.sizes)}, look at the output of those that are missing, "
            "or let the others wait longer with P3KV_RENDEZVOUS_TIMEOUT_S.",
        )

    def left_early(self, node: Node) -> Failure:
        """Why the job ends if others still needed a node that left."""
        return Failure(
            f"the process ended while others still needed it ({node.place()})",
            node.hello.role,
            self.rank_of(node),
            hint="Each process must stay until all workers are done, and each worker must "
            "train and reach as many barriers as the others; its own output may say more.",
        )

    def _missing(self, role: str) -> List[int]:
        """Ranks that no node has, if those of all that came are known; else none."""
        came = [self.rank_of(node) for node in self.role(role)]
        if UNKNOWN in came:
            return []
        return [rank for rank in range(self._wanted[role]) if rank not in came]

    def _reason_to_refuse(self, identity: bytes, hello: Hello) -> Optional[str]:
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"this job speaks protocol {PROTOCOL_VERSION}, the {hello.role} at {hello.host} "
                f"speaks {hello.protocol} (p3kv {hello.version}); install the same p3kv everywhere"
            )
        if not hmac.compare_digest(_as_bytes(hello.job), _as_bytes(self._job)):
            # A process that knows the job's name gets its token, so never send the name.
            return (
                "the scheduler at this address runs another job; give each job a port of its own "
                f"({self._variables.port}) and all its processes the same "
                f"{', '.join(self._variables.sizes)} and P3KV_JOB"
            )
        if hello.role not in self._wanted:
            return f"there is no role '{hello.role}'"
        if identity in self._nodes:
            return "this process has said Hello before"
        if len(self.role(hello.role)) >= self._wanted[hello.role]:
            return (
                f"the job has its {counted(self._wanted[hello.role], hello.role)} already; "
                "is a process of an earlier run still there, or is the number too small?"
            )
        return self._wrong_number(hello)

    def _wrong_number(self, hello: Hello) -> Optional[str]:
        """Why a process can't have the number that its launcher gives it."""
        role, rank, task = hello.role, hello.rank, hello.task
        others = self.role(role)
        if rank is not None:
            if not 0 <= rank < self._wanted[role]:
                return out_of_range(role, rank, self._wanted[role])
            holder = next((node for node in others if node.hello.rank == rank), None)
            return None if holder is None else taken(role, rank, holder.place())
        if task is not None:
            same = (node for node in others if (node.hello.rank, node.hello.task) == (None, task))
            holder = next(same, None)
            return None if holder is None else task_taken(role, task, holder.place())
        return None


def _turn(node: Node) -> Tuple[bool, int, int]:
    return (node.hello.task is None, node.hello.task or 0, node.arrival)


def _as_bytes(name: str) -> bytes:
    """For a comparison in constant time. A name from the environment may not be valid text."""
    return name.encode(errors="surrogateescape")
