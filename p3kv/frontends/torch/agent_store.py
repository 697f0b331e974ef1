"""The store of keys that torchrun's agents serve to the ranks that they start."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed

from p3kv.frontends.front_end import KeyStore

_CONNECT_S = 15.0
"""The agent has its store before it starts a rank. torch tries twice, and pauses between."""


def connected(host: str, port: int, timeout_s: float) -> KeyStore:
    """A connection to the agent on the host of rank 0, which waits so long for each key. Raises
    RuntimeError when the agent does not answer."""
    connect_s = timedelta(seconds=min(timeout_s, _CONNECT_S))
    store = torch.distributed.TCPStore(
        host, port, is_master=False, timeout=connect_s, wait_for_workers=False
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    found: KeyStore = store
    return found
