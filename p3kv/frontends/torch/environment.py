"""The environment variables of torch's that p3kv sets."""

from __future__ import annotations

import os
import socket
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
    below = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    if hasattr(below, "host"):  # as init_method="tcp://host:port" makes it
        address, port = below.host, str(below.port)
    else:  # of a file, or the script's own; the number only tells jobs of a host apart
        store.set(f"p3kv {rank}", f"{socket.gethostname()} {os.getpid()}")
        hosts = [store.get(f"p3kv {one}").decode().split() for one in range(size)]
        address, port = hosts[0]
        if all(host == address for host, _ in hosts):
            address = "127.0.0.1"
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)


def has_launcher() -> bool:
    """Whether something in the environment says where a process group meets."""
    return any(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
