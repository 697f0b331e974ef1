"""Knowledge and decisions of the scheduler, without any input or output."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import msgspec

from p3kv.common.words import counted
from p3kv.config.ranks import DMLC, Variables
from p3kv.errors import ProtocolError
from p3kv.scheduler.agreement import Agreement
from p3kv.scheduler.deadlocks import Deadlocks
from p3kv.scheduler.keys import Keys
from p3kv.scheduler.losses import Losses
from p3kv.scheduler.membership import JobFails, Membership, Node, Replies
from p3kv.slicing import Topology
from p3kv.wire.launcher_link import PartEnded
from p3kv.wire.messages import (
    UNKNOWN,
    Abort,
    Alive,
    AskReports,
    BarrierReached,
    Bye,
    DeclareKey,
    Failure,
    FromScheduler,
    Hello,
    Lag,
    LinkEnded,
    Measured,
    Numbers,
    ProcessReport,
    Ready,
    Refused,
    ReportFailure,
    Reports,
    ServerNumbers,
    StoreForgotten,
    StoreMade,
    ToScheduler,
    Welcomed,
    Whereabouts,
    WorkerNumbers,
    WorkersMayLeave,
    slowest,
)


class KeptReports:
    """Keeps each node's newest numbers."""

    def __init__(self) -> None:
        self._numbers: Dict[bytes, Numbers] = {}
        self._slowest: Optional[Lag] = None

    def heard(self, node: Node, message: Alive) -> Alive:
        """Take a node's sign of life; return the answer."""
        if message.numbers is not None:
            self._numbers[node.identity] = message.numbers
            if node.hello.role == "server" and node.rank == 0:  # often enough for all
                told = self._numbers.values()
                self._slowest = slowest(
                    [one for one in told if isinstance(one, ServerNumbers)],
                    [one for one in told if isinstance(one, WorkerNumbers)],
                )
        return Alive(slowest=self._slowest)

    def of(self, members: Membership) -> Reports:
        """Reports on all nodes that have come."""
        return Reports(
            [
                ProcessReport(
                    node.hello.role, node.rank, node.hello.host, node.gone,
                    self._numbers.get(node.identity),
                )
                for role in ("worker", "server")
                for node in members.role(role)
            ]
        )  # fmt: skip


_WORTH_A_LINE = 1.1
"""A busiest link that is busy for so many times as long as it need be is worth a warning."""


def too_few_servers(hosts: Topology) -> Optional[str]:
    """Warn where workers' links idle while servers' links are full; else None.

    All links count as equal: where a server's link is full, a worker's rate is its part of that
    link, however fast its own is.
    """
    enough = hosts.with_servers_beside_workers()
    if hosts.busy <= _WORTH_A_LINE * enough.busy:
        return None
    on, of = _hosts(hosts.servers), _hosts(hosts.workers)
    there = f"{len(hosts.servers)} on {on}, for workers on {of}"
    would_do = f"{len(enough.servers)}, so that each worker's host has one"
    if not enough.busy:
        return f"too few servers: {there}. With {would_do}, no gradient would cross the network"
    return (
        f"too few servers: {there}. The busiest link carries {hosts.busy / enough.busy:.1f} times "
        f"what it would with {would_do}; where the network is the limit, steps take longer for it"
    )


def _hosts(names: Sequence[str]) -> str:
    return counted(len(set(names)), "host")


class Job:
    """The state of one job: `handle` takes a message and returns what to send. `failure` is set
    once and says why the job ends; `ended` is true when nobody is left."""

    def __init__(
        self, name: str, num_workers: int, num_servers: int, variables: Variables = DMLC
    ) -> None:
        """`variables`: how the job's users have said its address and its size."""
        self.failure: Optional[Failure] = None
        self._members = Membership(name, num_workers, num_servers, variables)
        self._waits = Deadlocks(self._members)
        self._agreement = Agreement(self._members, num_servers, self._waits)
        self._keys = Keys(num_servers)
        self._losses = Losses(self._members)
        self._reports = KeptReports()

    @property
    def assembled(self) -> bool:
        """Whether all processes have arrived."""
        return self._members.assembled

    @property
    def ended(self) -> bool:
        """Whether no process is left that the scheduler should wait for."""
        everybody_came = self.assembled or self.failure is not None
        return everybody_came and self._members.all_left and not self.undecided

    @property
    def undecided(self) -> bool:
        """Whether a loss was seen that may end the job, and other witnesses may still report."""
        return self.failure is None and bool(self._losses)

    @property
    def has_followers(self) -> bool:
        """Whether a script has ended because it lost another process: whose connection to the
        scheduler has ended, too, does not come back."""
        return self._losses.has_followers

    @property
    def knows_followed(self) -> bool:
        """Whether it shows which process that was."""
        return self.failure is None and self._losses.knows_followed

    def node(self, identity: bytes) -> Optional[Node]:
        """The node with this identity, if it belongs to the job."""
        return self._members.node(identity)

    def unreached(self) -> List[str]:
        """Processes that can't be told of a failure: they have not joined, or do not answer."""
        return self._members.missing() + self._losses.silent

    def who_came(self) -> str:
        """Lists who is missing and where the others have come from, for people who start them."""
        return self._members.who_came()

    def too_few_servers(self) -> Optional[str]:
        """Whether more servers would help, in words for people, once all have arrived."""
        return too_few_servers(self._members.hosts(neighbours_as_one=True))

    def shifted_names(self) -> Optional[str]:
        """Warning, once, of workers that number their parameters otherwise."""
        return self._keys.names.shift()

    def handle(self, identity: bytes, message: ToScheduler) -> Replies:
        """Takes a message; returns what to send, and to whom."""
        if isinstance(message, Hello):
            return self._hello(identity, message)
        if isinstance(message, AskReports):
            return [(identity, self._reports.of(self._members))]
        node = self._members.node(identity)
        if node is None:
            return [(identity, Refused("say Hello first"))]
        try:
            return self._handle(node, message)
        except JobFails as end:
            return end.first + self.fail(end.failure)

    def fail(self, failure: Failure) -> Replies:
        """Ends the job because of `failure`, unless it ends for another reason already."""
        if self.failure is None:
            self.failure = failure
        self._losses.count_as_left()
        return [(node.identity, Abort(self.failure)) for node in self._members.present]

    def wrong_words(self, node: Node, error: ProtocolError) -> Replies:
        """Ends the job because a node has broken the protocol."""
        return self.fail(self._out_of_protocol(node, f"{error} ({node.name()})"))

    def lost(self, node: Node, silent_s: float) -> None:
        """Note that a node's connection ended without a Bye, `silent_s` after it was last heard of;
        its last messages may still be under way, so `judge` decides later."""
        if self.failure is not None:
            self._members.left(node)
        else:
            self._losses.lost(node, silent_s)

    def stops(self) -> Replies:
        """Note that all scripts get a signal to end: from now on workers may leave."""
        self._agreement.let_workers_leave()
        return self._members.tell_servers(WorkersMayLeave())

    def process_ended(self, end: PartEnded) -> None:
        """Note that the launcher has seen a process end; `judge` decides later."""
        if self.failure is None:
            self._losses.process_ended(end)

    def tell_others(self, about: Node, message: FromScheduler) -> Replies:
        """Replies that send a message to all nodes but the one that it is about."""
        return [(node.identity, message) for node in self._members.present if node is not about]

    def look(self, now: float, first_s: float) -> Replies:
        """Look about each second for workers that wait for each other; end a job that would for
        ever."""
        if self.failure is not None:
            return []
        try:
            return self._waits.look(now, first_s)
        except JobFails as end:
            return self.fail(end.failure)

    def judge(self) -> Replies:
        """End the job if a loss is a reason, once all witnesses have had time to report."""
        cause = None if self.failure is not None else self._losses.verdict()
        return [] if cause is None else self.fail(cause)

    def nobody_else_came(self, waited_s: float) -> Replies:
        """Ends the job because some processes did not arrive."""
        return self.fail(self._members.nobody_else_came(waited_s))

    def _hello(self, identity: bytes, hello: Hello) -> Replies:
        reason = self._members.admit(identity, hello)
        if reason is not None:
            return [(identity, Refused(reason))]
        replies: Replies = [(identity, Welcomed())]
        if self.failure is not None:
            return [*replies, (identity, Abort(self.failure))]
        return replies + self._members.assemble() + self._members.let_servers_go()

    def _handle(self, node: Node, message: ToScheduler) -> Replies:
        if isinstance(message, Bye):
            return self._bye(node)
        if isinstance(message, ReportFailure):
            return self._report(node, message)
        if isinstance(message, LinkEnded):
            self._losses.link_ended(message.failure)
            return []
        if isinstance(message, Alive):
            node.round = max(node.round, message.round)
            return [(node.identity, self._reports.heard(node, message))]
        if self.failure is not None:
            return [(node.identity, Abort(self.failure))]
        if isinstance(message, Whereabouts) and node.hello.role == "worker":
            self._waits.take(node, message)
            return []
        if not self._agreement.in_turn(node, message):
            reason = f"it sent {type(message).__name__} out of turn ({node.name()})."
            raise JobFails(self._out_of_protocol(node, reason))
        if isinstance(message, Ready):
            self._keys.choose_placement(node, message.settings.placement)
            return self._agreement.ready(node, message)
        if isinstance(message, Measured):
            return self._agreement.measured(node, message, self._keys.sliced_elems)
        if isinstance(message, DeclareKey):
            agreed = self._agreement
            assert agreed.slice_sizes is not None
            return self._keys.declare(
                node, message, agreed.slice_sizes.size_for_credit, agreed.topology
            )
        if isinstance(message, StoreForgotten):
            staying = [one.rank for one in self._members.workers if not one.gone]
            return self._keys.forget(node, message.store, staying)
        if isinstance(message, StoreMade):
            return self._keys.made(node, message)
        assert isinstance(message, BarrierReached)
        return self._agreement.barrier(node, message)

    def _bye(self, node: Node) -> Replies:
        if node.gone:  # it has said why
            return []
        self._members.left(node)
        if self.failure is not None:
            return []
        if self._members.workers_left:
            return self._members.let_servers_go()
        if node.hello.role == "server" or self._agreement.starts_without(node):
            raise JobFails(self._members.left_early(node))
        return self._agreement.worker_left()

    def _report(self, node: Node, message: ReportFailure) -> Replies:
        failure = message.failure
        if failure.rank == UNKNOWN and failure.role == node.hello.role:
            failure = msgspec.structs.replace(failure, rank=self._members.rank_of(node))
        if not message.second_hand:
            return self.fail(failure)
        if failure.rank == self._members.rank_of(node) and failure.role == node.hello.role:
            self._losses.script_followed(failure, node)
        else:
            self._losses.lost_by_peer(failure, node)
        return []

    def _out_of_protocol(self, node: Node, reason: str) -> Failure:
        rank = self._members.rank_of(node)
        return Failure(reason, node.hello.role, rank, error="ProtocolError")
