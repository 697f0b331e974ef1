"""Requests for values that are not new enough yet."""

from __future__ import annotations

import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

from p3kv.server.engine import Unit
from p3kv.wire.fields import PullHeader
from p3kv.wire.header import INITIAL_ROUND


class Pull(NamedTuple):
    """A worker's request for a value, and since when it waits, on the monotonic clock."""

    request: PullHeader
    answer: Callable[[], None]
    since_s: float


class Pulls:
    """Answers each request as soon as the unit's value is new enough. Belongs to the server's
    thread."""

    def __init__(self) -> None:
        self.waiting: Dict[Unit, List[Pull]] = {}

    def take(self, unit: Unit, request: PullHeader, answer: Callable[[], None]) -> None:
        """Has `answer` be called: now, or when a round has ended that the request waits for."""
        self._answer_or_keep(unit, Pull(request, answer, time.monotonic()))

    def answer(self, unit: Unit) -> None:
        """To be called when a unit has another value."""
        for pull in self.waiting.pop(unit, ()):
            self._answer_or_keep(unit, pull)

    def for_initial_values(self) -> Iterator[Tuple[Unit, List[Pull]]]:
        """The units that have no value at all, and what waits for them."""
        for unit, pulls in self.waiting.items():
            # Slices of a later size have no value before their first round, and wait for others.
            if unit.round < INITIAL_ROUND and unit.first_round == INITIAL_ROUND:
                yield unit, pulls

    def _answer_or_keep(self, unit: Unit, pull: Pull) -> None:
        if unit.ledger.is_new_enough(pull.request.rank, pull.request.round):
            pull.answer()
        else:
            self.waiting.setdefault(unit, []).append(pull)
