"""Where a process that writes parts of checkpoints is in its job."""

from __future__ import annotations

from typing import Callable, NamedTuple, Sequence


class Place(NamedTuple):
    """A process among those of its job, once all have arrived."""

    rank: int
    host: str
    servers_hosts: Sequence[str]
    """By rank."""
    workers_hosts: Sequence[str]
    """By rank."""
    mark: Callable[[str], bytes]
    """Gives the mark of a process such as "server 0" (`p3kv.checkpoints.marks`)."""
