"""Measurements of processes: the same numbers in `stats()`, in metrics, and on the control line.

Names end in their units. Numbers from the start of the process on only grow, but those that say
otherwise; `GAUGES` names these. So whoever keeps two reports of a process knows its rates.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple, Union

from p3kv.wire.messages.base import MAX_RANK, Message, check

MAX_LAYER_CHARS = 256


class _Numbers(Message, frozen=True):
    uptime_s: float = 0.0
    """For how long the process had measured when it read the numbers."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            for number in value if isinstance(value, tuple) else [value]:
                if isinstance(number, (int, float)):
                    check(0 <= number < math.inf, f"{field} is {number}")


class WorkerNumbers(_Numbers, frozen=True):
    """Measurements of a worker."""

    bytes_sent: int = 0
    bytes_received: int = 0
    """Bytes of slices, without headers."""
    slices_sent: int = 0
    slices_received: int = 0
    inversions: int = 0
    inversion_bytes: int = 0
    """Slices, and their bytes, that left while a more urgent one waited for a full connection."""
    stale_values: int = 0
    """Values of whole keys with which the worker has gone on by another consistency rule than the
    default."""
    stale_rounds: int = 0
    """The rounds that they have lacked, in all."""
    most_stale_rounds: int = 0
    """The most that one of them has lacked."""
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    """All bytes on connections to servers on other hosts; to all servers, if all are on this
    host."""
    steps: int = 0
    """Steps that have ended: the next one's first gradient was ready."""
    step_s: float = 0.0
    """The time of all these steps."""
    computing_s: float = 0.0
    script_s: float = 0.0
    network_s: float = 0.0
    server_s: float = 0.0
    straggler_s: float = 0.0
    processor_s: float = 0.0
    """Parts of this time; together they are all of it (docs/measuring.md)."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    """Time of one step, the median of the last ones, without waiting; a gauge."""
    push_bytes_s: float = 0.0
    """How fast this worker could send to all servers while all workers did, and received as much,
    as measured when the job began; 0 if a slice size was set. A gauge."""
    queued_frames: int = 0
    """Frames that wait to be sent now; a gauge."""
    slowest_layer: str = ""
    """The parameter for which the most steps have waited longest; empty if none has waited."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.slowest_layer) <= MAX_LAYER_CHARS, "a layer's name is too long")


class ServerNumbers(_Numbers, frozen=True):
    """Measurements of a server."""

    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    """All bytes on the connections of workers."""
    inversions: int = 0
    inversion_bytes: int = 0
    queued_frames: int = 0
    """Frames that wait to be handled or to be sent now; a gauge."""
    rounds: int = 0
    """Rounds of slices for which all workers have pushed."""
    last_rounds: Tuple[int, ...] = ()
    """By rank of the workers: in how many of these rounds the worker's push came last."""
    last_s: Tuple[float, ...] = ()
    """By rank: for how long, in all, the others' pushes had to wait for it then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = {len(self.last_rounds), len(self.last_s)}
        check(len(lengths) == 1 and max(lengths) <= MAX_RANK + 1, "lags are not by rank")


Numbers = Union[WorkerNumbers, ServerNumbers]

GAUGES = ("forward_s", "backward_s", "push_bytes_s", "queued_frames")
"""The names of numbers that may become smaller."""


class Lag(Message, frozen=True):
    """The worker whose gradients come last: in `share` of the rounds its was the last one, then
    `lag_s` after the others. `waiting`: the part of a step for which another worker has waited for
    that, of the worker that has waited most."""

    rank: int
    share: float
    lag_s: float
    waiting: float = 0.0


def slowest(
    servers: Sequence[ServerNumbers], workers: Sequence[WorkerNumbers] = ()
) -> Optional[Lag]:
    """The worker whose gradients come last by most, or None without any round; `workers` have
    waited for it."""
    rounds = sum(server.rounds for server in servers)
    if not rounds:
        return None
    ranks = max(len(server.last_s) for server in servers)

    def total(name: str, rank: int) -> float:
        lists = [getattr(server, name) for server in servers]
        return float(sum(numbers[rank] for numbers in lists if rank < len(numbers)))

    rank = max(range(ranks), key=lambda one: total("last_s", one))
    last = total("last_rounds", rank)
    waited = [one.straggler_s / one.step_s for one in workers if one.step_s > 0]
    waiting = min(1.0, max(waited, default=0.0))
    return Lag(rank, last / rounds, total("last_s", rank) / last, waiting) if last else None
