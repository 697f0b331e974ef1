"""A server's engine without a server: what it is given, and what comes out."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple

from p3kv.consistency import BulkSynchronous
from p3kv.server.engine import Ended, Engine, ServerSlice, Unit
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.held_rounds import HeldRounds
from p3kv.server.engine.plan import KeyPlan, Rules
from p3kv.wire.messages import DeclaredKey


class Result(NamedTuple):
    """A round of a slice that has ended, with its value; or an older value to go on with."""

    slice_: ServerSlice
    value: Buffer
    round: int
    wanting: List[int]
    others: List[int]
    no_gradient: bool


def engine_of(num_workers: int, rank: int = 0, **rules: Any) -> Engine:
    """The engine of a server, with rules of synchronous training. No squares are sent."""
    held_rounds: HeldRounds[Unit] = HeldRounds(lambda step, squares: None)
    return Engine(Rules(rank, BulkSynchronous(num_workers), held_rounds, **rules))


def one_slice(engine: Engine, declared: DeclaredKey) -> ServerSlice:
    """All of a key as one slice."""
    plan = KeyPlan(declared, engine.rules)
    return ServerSlice(plan, 0, plan.kept_elems)


def with_values(ended: Iterable[Ended]) -> Iterator[Result]:
    """Each with the value as it is when the engine gives the result."""
    for one in ended:
        assert isinstance(one.unit, ServerSlice)
        value = one.unit.known_value()
        yield Result(one.unit, value, one.round, one.wanting, one.others, one.no_gradient)


def end_round(unit: Unit) -> None:
    """Ends the next round of a unit that has no engine, and must be complete."""
    (following,) = unit.ledger.complete()
    unit.update(following)
    unit.ledger.end(following)


def missing(unit: Unit) -> Dict[int, List[int]]:
    """By round, the ranks for whose pushes it waits."""
    return {number: ranks for number, _, ranks in unit.ledger.waits()}
