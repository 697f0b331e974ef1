"""Measurements of a job's processes, as they have said last."""

from __future__ import annotations

from typing import Dict, Optional

from p3kv.scheduler.membership import Membership, Node
from p3kv.wire.messages import (
    Alive,
    Lag,
    Numbers,
    ProcessReport,
    Reports,
    ServerNumbers,
    WorkerNumbers,
    slowest,
)


class KeptReports:
    """Keeps each node's newest numbers."""

    def __init__(self) -> None:
        self._numbers: Dict[bytes, Numbers] = {}
        self._slowest: Optional[Lag] = None

    def heard(self, node: Node, message: Alive) -> Alive:
        """Takes a node's sign of life; returns the answer to it."""
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
