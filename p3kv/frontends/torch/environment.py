"""The environment variables of torch's that p3kv sets."""

from __future__ import annotations

import os
from typing import Any

from p3kv.common.addresses import interface_of


def talk_at(address: str) -> None:
    """Has gloo use the interface of this host that has an address, unless the user has chosen."""
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def take_rank(rank: int, size: int, store: Any) -> None:
    """Says which rank this process has, and where its process group has met, unless something has
    said it. `store` is the group's."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(size))
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):  # as init_method="tcp://host:port" makes it
        os.environ.setdefault("MASTER_ADDR", store.host)
        os.environ.setdefault("MASTER_PORT", str(store.port))


def has_launcher() -> bool:
    """Whether something in the environment says where a process group meets."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
