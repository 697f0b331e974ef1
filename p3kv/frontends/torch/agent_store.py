"""The store of keys that torchrun's agents serve to the ranks that they start."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed

from p3kv.frontends.front_end import KeyStore


def connected(host: str, port: int, timeout_s: float) -> KeyStore:
    """A connection to the agent on the host of rank 0. Raises RuntimeError when it does not
    answer."""
    store: KeyStore = torch.distributed.TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )
    return store
