"""A server's engine without a server: what it is given, and what comes out."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional

from p3kv.consistency import BulkSynchronous
from p3kv.server.engine import (
    Buffer,
    Command,
    Engine,
    Record,
    Round,
    ServerRows,
    ServerSlice,
    ServerState,
)
from p3kv.server.engine.state import BufferPool
from p3kv.wire.fields import PushHeader, PushRowsHeader
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    WANTS_RESULT,
    Kind,
)
from p3kv.wire.messages import DeclaredKey, JobSettings, SliceSizes
from p3kv.wire.rows import Rows


class Result(NamedTuple):
    """A round of a slice that has ended, with its value; or an older value to go on with."""

    slice_: ServerSlice
    value: Buffer
    round: int
    wanting: List[int]
    others: List[int]
    no_gradient: bool


def engine_of(
    num_workers: int, rank: int = 0, pool: Optional[BufferPool] = None, **job: Any
) -> Engine:
    """The engine of a server, with rules of synchronous training."""
    state = ServerState(rank, BulkSynchronous(num_workers), JobSettings(**job))
    if pool is not None:
        state.pool = pool
    return Engine(state)


def one_slice(engine: Engine, declared: DeclaredKey) -> ServerSlice:
    """All of a key as one slice."""
    engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(1 << 20))
    return engine.declare(declared).slice_at(INITIAL_ROUND, 0, 0)


def push(
    slice_: Record[Any],
    rank: int,
    round_: int,
    gradient: Optional[Buffer],
    wants: bool = True,
    priority: int = 0,
    step: int = 0,
    flags: int = 0,
    **more: float,
) -> bool:
    """Pushes a slice, and tells whether a round may end."""
    assert isinstance(slice_, ServerSlice)
    flags |= WANTS_RESULT if wants else 0
    flags |= NO_GRADIENT if gradient is None and not flags & IN_HOST_SUM else 0
    payload_bytes = 0
    if gradient is not None:
        payload_bytes = len(gradient.bytes)
    header = PushHeader(
        Kind.PUSH, rank, flags, payload_bytes, key=slice_.plan.key_id, slice=slice_.index,
        round=round_, priority=priority, step=step, **more,
    )  # fmt: skip
    return slice_.push(header, gradient)


def push_encoded(slice_: ServerSlice, rank: int, round_: int, gradient: Buffer, step: int) -> None:
    """Pushes what the key's codec has made of a slice."""
    push(slice_, rank, round_, gradient, step=step, flags=ENCODED)


def push_in_host_sum(slice_: Record[Any], rank: int, round_: int, step: int) -> None:
    """Pushes nothing: the worker's gradient is in its host's sum."""
    push(slice_, rank, round_, None, step=step, flags=IN_HOST_SUM)


def push_host_sum(
    slice_: Record[Any], rank: int, round_: int, total: Optional[Buffer], workers: int
) -> None:
    """Pushes the sum of so many workers of a host, which have been counted before."""
    push(slice_, rank, round_, total, flags=CARRIES, workers=workers)


def push_rows(rows: ServerRows, rank: int, round_: int, frames: int, some: Rows, step: int) -> None:
    """Pushes some rows, one of the frames of a push."""
    header = PushRowsHeader(
        Kind.PUSH_ROWS, rank, key=rows.plan.key_id, round=round_, frames=frames, step=step
    )
    rows.add(header, some)


def ended(commands: Iterable[Command]) -> Iterator[Round[Any]]:
    """The rounds among commands, when the engine gives them."""
    return (one for one in commands if isinstance(one, Round))


def with_values(commands: Iterable[Command]) -> Iterator[Result]:
    """Each round that has ended with the value as it is when the engine gives the result."""
    for one in ended(commands):
        assert isinstance(one.record, ServerSlice)
        value = one.record.known_value()
        yield Result(one.record, value, one.number, one.wanting, one.others, not one.changed)


def end_round(record: Record[Any]) -> None:
    """Ends the next round of a record, which must be complete."""
    current = record.rounds.next()
    assert current is not None
    assert record.end(current) == (current,)


def missing(record: Record[Any]) -> Dict[int, List[int]]:
    """By round, the ranks for whose pushes it waits."""
    return {wait.round: wait.missing for wait in record.rounds.waits()}
