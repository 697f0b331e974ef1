"""Consequences of a message: messages to send, or the end of the job."""

from __future__ import annotations

from typing import List, Tuple

from p3kv.wire.messages import Failure, FromScheduler

Replies = List[Tuple[bytes, FromScheduler]]
"""Messages to send, each with the identity of the node that gets it."""


class JobFails(Exception):
    """Raised when a message makes the job fail; `Job` then tells all nodes."""

    def __init__(self, failure: Failure, *first: Tuple[bytes, FromScheduler]) -> None:
        """`first` is what to send before all nodes are told of the failure."""
        super().__init__(failure.words)
        self.failure = failure
        self.first: Replies = list(first)
