"""Losses: what was seen of processes that ended or fell silent, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple

from msgspec.structs import replace

from p3kv.common import words
from p3kv.scheduler.membership import Membership, Node
from p3kv.wire.launcher_link import PartEnded
from p3kv.wire.messages import UNKNOWN, Failure
from p3kv.wire.silence import SILENT_HINT, SILENT_S, for_so_long

_OUT_OF_MEMORY = "The kernel's out-of-memory killer does this, too: its log (dmesg) says so."
_ITS_OUTPUT = "See its own output for why."


@dataclass
class _Suspect:
    """Facts known of one process."""

    role: str
    rank: int
    round: int = UNKNOWN
    place: str = ""
    end: Optional[PartEnded] = None
    lacks: str = ""
    """Words for what the process had not done when it ended."""
    silent_s: Optional[float] = None
    """How long the scheduler had not heard from it when their connection ended."""
    report: Optional[Failure] = None

    def failure(self) -> Failure:
        reason, hint = self._reason_and_hint()
        error = "RendezvousError" if self.lacks == _NEVER_JOINED else "PeerLostError"
        return Failure(reason, self.role, self.rank, self.round, error, hint)

    def _reason_and_hint(self) -> Tuple[str, str]:
        if self.end is not None:
            killed = self.end.signal == "SIGKILL"
            hint = _OUT_OF_MEMORY if killed else "" if self.end.signal else _ITS_OUTPUT
            if self.lacks == _NEVER_JOINED and self.end.code == 0:
                hint = f"Does its script import p3kv, and use {words.current().use_store}?"
            return f"its process {self.end.how}{self.lacks}", hint
        if self.silent_s is not None and self.silent_s >= SILENT_S:
            reason = f"it has not answered for {for_so_long(self.silent_s)} ({self.place})"
            return reason, SILENT_HINT
        if self.silent_s is not None:
            return (
                f"its process ended without a word ({self.place})",
                f"{_ITS_OUTPUT} A signal such as that of the kernel's out-of-memory killer leaves "
                "none.",
            )
        assert self.report is not None
        return self.report.reason, self.report.hint


_NEVER_JOINED = " before it joined the job"
_WITHOUT_LEAVING = " without leaving the job"
_ENDS_TOO = (
    "had ended in order before, which ends connections of the script's own, too: have all workers "
    "make the same calls until the end."
)
_LEFT = ", though it had left the job in order"


class Losses:
    """Collects what witnesses have seen until `verdict`, since last messages may be under way.

    The launcher knows best how a process ended, and the scheduler how long it was silent and in
    which round; its peers may know a later one.
    """

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._suspects: Dict[Tuple[str, int], _Suspect] = {}
        self._rounds: Dict[Tuple[str, int], int] = {}
        """Round of each process whose data connections have ended."""
        self._lost: List[Tuple[Node, float]] = []
        self._silent: List[str] = []
        self._ends: List[PartEnded] = []
        self._followers: Set[Tuple[str, int]] = set()
        """Whose scripts have ended because they lost another process, as they say."""

    def __bool__(self) -> bool:
        return bool(self._suspects or self._lost or self._ends)

    @property
    def silent(self) -> List[str]:
        """Role and rank of processes that had stopped answering when their connection ended."""
        return list(self._silent)

    @property
    def has_followers(self) -> bool:
        """Whether scripts have ended because they lost another process, as they say."""
        return bool(self._followers)

    @property
    def knows_followed(self) -> bool:
        """Whether another process has ended than these."""
        others = {*self._suspects, *((end.role, end.rank) for end in self._ends)}
        lost = any(not node.gone for node, _ in self._lost)
        return self.has_followers and (lost or bool(others - self._followers))

    def lost(self, node: Node, silent_s: float) -> None:
        """Note that a node's connection ended, `silent_s` after the node was last heard of."""
        if not node.gone:
            self._lost.append((node, silent_s))

    def lost_by_peer(self, failure: Failure, witness: Node) -> None:
        """Note that a node has lost its connection to the process that `failure` is about."""
        suspect = self._suspect(failure.role, failure.rank)
        suspect.round = max(suspect.round, failure.round)
        if suspect.report is None:
            reason = f"{failure.reason} (seen by {self._members.called(witness)})"
            suspect.report = Failure(reason, failure.role, failure.rank, hint=failure.hint)

    def script_followed(self, failure: Failure, node: Node) -> None:
        """Note that a node's script has ended because a connection of its own to another process
        has, as a process group's: any other loss counts before it."""
        self._suspect(failure.role, failure.rank).report = failure
        self._followers.add((failure.role, failure.rank))
        self._members.left(node)

    def link_ended(self, failure: Failure) -> None:
        """Note the round in which a data connection to the process of `failure` has ended."""
        who = failure.role, failure.rank
        self._rounds[who] = max(failure.round, self._rounds.get(who, UNKNOWN))

    def process_ended(self, end: PartEnded) -> None:
        """Note that the launcher has seen a process end."""
        node = self._members.ranked(end.role, end.rank)
        if not (node is not None and node.gone and end.code == 0):
            self._ends.append(end)

    def verdict(self) -> Optional[Failure]:
        """Return why the job ends, if any of the losses is a reason.

        Of several processes, one that has ended counts before one that the scheduler can't reach,
        and that before one to which only a peer has lost its connection. One whose script has
        ended because it lost another counts last, and a server, which may be beside a worker and
        end with it, after workers.
        """
        for lost, silent_s in self._lost:
            if not lost.gone:
                suspect = self._suspect(lost.hello.role, self._members.rank_of(lost))
                suspect.round = max(suspect.round, lost.round)
                suspect.place, suspect.silent_s = lost.place(), silent_s
                if silent_s >= SILENT_S:
                    self._silent.append(self._members.called(lost))
        for end in self._ends:
            node = self._members.ranked(end.role, end.rank)
            if node is None:
                if not self._members.assembled:
                    self._accuse(end, _NEVER_JOINED)
            elif not node.gone:
                self._members.left(node)
                self._accuse(end, _WITHOUT_LEAVING if end.code == 0 else "")
            elif end.code != 0 and (end.role, end.rank) not in self._followers:
                self._accuse(end, _LEFT)
        self._ends.clear()
        every = self._suspects
        if not every:
            self._lost.clear()
            return None
        suspects = [one for who, one in every.items() if who not in self._followers]
        suspects = sorted(suspects or every.values(), key=lambda one: one.role == "server")
        ended = [one for one in suspects if one.end is not None]
        unreached = [one for one in suspects if one.silent_s is not None]
        guilty = (ended or unreached or suspects)[0]
        guilty.round = max(guilty.round, self._rounds.get((guilty.role, guilty.rank), UNKNOWN))
        failure = guilty.failure()
        left = [
            self._members.called(node)
            for node in self._members.workers
            if node.gone and ("worker", self._members.rank_of(node)) not in self._followers
        ]
        if left and (guilty.role, guilty.rank) in self._followers:
            hint = f"{' and '.join(left)} {_ENDS_TOO} {failure.hint}"
            failure = replace(failure, hint=hint.rstrip())
        return failure

    def count_as_left(self) -> None:
        """Wait for no last messages of lost processes: the job has failed."""
        for lost, _ in self._lost:
            self._members.left(lost)
        self._lost.clear()

    def _accuse(self, end: PartEnded, lacks: str) -> None:
        suspect = self._suspect(end.role, end.rank)
        suspect.end, suspect.lacks = end, lacks

    def _suspect(self, role: str, rank: int) -> _Suspect:
        return self._suspects.setdefault((role, rank), _Suspect(role, rank))
