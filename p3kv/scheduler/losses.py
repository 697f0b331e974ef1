"""Losses: what was seen of processes that ended or fell silent, and what it means."""

from __future__ import annotations

from typing import List, Optional, Tuple

from p3kv.scheduler.blame import LEFT, NEVER_JOINED, WITHOUT_LEAVING, Blame
from p3kv.scheduler.membership import Membership, Node
from p3kv.wire.launcher_link import PartEnded
from p3kv.wire.messages import Failure
from p3kv.wire.silence import SILENT_S


class Losses:
    """Collects losses until `verdict`, because last messages may still be under way."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._blame = Blame()
        self._lost: List[Tuple[Node, float]] = []
        self._silent: List[str] = []
        self._ends: List[PartEnded] = []

    def __bool__(self) -> bool:
        return bool(self._blame or self._lost or self._ends)

    @property
    def silent(self) -> List[str]:
        """Role and rank of processes that had stopped answering when their connection ended."""
        return list(self._silent)

    def lost(self, node: Node, silent_s: float) -> None:
        """A node's connection ended, `silent_s` after the scheduler last heard from the node."""
        if not node.gone:
            self._lost.append((node, silent_s))

    def lost_by_peer(self, failure: Failure, witness: Node) -> None:
        """A node has lost its connection to the process that `failure` is about."""
        self._blame.lost(failure, self._members.called(witness))

    def link_ended(self, failure: Failure) -> None:
        """A node's data connection to the process that `failure` is about has ended."""
        self._blame.link_ended(failure)

    def process_ended(self, end: PartEnded) -> None:
        """The launcher has seen a process end."""
        node = self._members.ranked(end.role, end.rank)
        if not (node is not None and node.gone and end.code == 0):
            self._ends.append(end)

    def verdict(self) -> Optional[Failure]:
        """Why the job ends, if any of the losses is a reason."""
        for lost, silent_s in self._lost:
            if not lost.gone:
                rank = self._members.rank_of(lost)
                self._blame.disconnected(lost.hello.role, rank, lost.place(), silent_s, lost.round)
                if silent_s >= SILENT_S:
                    self._silent.append(self._members.called(lost))
        for end in self._ends:
            node = self._members.ranked(end.role, end.rank)
            if node is None:
                if not self._members.assembled:
                    self._blame.ended(end, NEVER_JOINED)
            elif not node.gone:
                self._members.left(node)
                self._blame.ended(end, WITHOUT_LEAVING if end.code == 0 else "")
            elif end.code != 0:
                self._blame.ended(end, LEFT)
        self._ends.clear()
        if self._blame:
            return self._blame.verdict()
        self._lost.clear()
        return None

    def count_as_left(self) -> None:
        """The job has failed: the scheduler waits for no last messages of lost processes."""
        for lost, _ in self._lost:
            self._members.left(lost)
        self._lost.clear()
