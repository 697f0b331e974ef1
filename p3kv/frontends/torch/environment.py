"""The environment variables of torch's that p3kv sets."""

from __future__ import annotations

import os

from p3kv.common.addresses import interface_of


def talk_at(address: str) -> None:
    """Has gloo use the interface of this host that has an address, unless the user has chosen."""
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def take_rank(rank: int, size: int) -> None:
    """Says which rank this process has, unless something has said it."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(size))


def has_launcher() -> bool:
    """Whether something in the environment says where a process group meets."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
