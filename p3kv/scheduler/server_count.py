"""Whether a job has enough servers, in the right places, for its workers' links."""

from __future__ import annotations

from typing import Optional, Sequence

from p3kv.common.words import counted
from p3kv.slicing import Topology

_WORTH_A_LINE = 1.1
"""A busiest link that is busy for so many times as long as it need be is worth a warning."""


def too_few_servers(hosts: Topology) -> Optional[str]:
    """Warning to users whose workers' links idle while servers' links are full; else None.

    All links count as equal, because measured rates can't tell here: where a server's link is full,
    a worker's rate is its part of that link, however fast its own is.
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
