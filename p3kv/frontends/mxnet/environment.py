"""What is known of MXNet without an import of it: its environment variables, which are read and set
in this one place, the types of stores, and words for advice."""

from __future__ import annotations

import os
from typing import Mapping

from p3kv import config

ALIASES = {"slice_size": "MXNET_KVSTORE_SLICE_THRESHOLD"}
"""MXNet's variables for settings of p3kv's."""
PREFIX = "MXNET_"


def update_on_kvstore_default(environ: Mapping[str, str] = os.environ) -> bool:
    """MXNET_UPDATE_ON_KVSTORE: whether optimizers run on the servers unless told."""
    return config.flag("MXNET_UPDATE_ON_KVSTORE", True, environ)


def runs_operations_at_once(environ: Mapping[str, str] = os.environ) -> bool:
    """MXNET_ENGINE_TYPE: whether a call returns when its operation is complete."""
    return environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


def listen_at(address: str) -> None:
    """Has MXNet's own store use this address of this host, where it would choose one by itself."""
    os.environ["DMLC_NODE_HOST"] = address


def prepare_for_server_optimizer() -> None:
    """Sets MXNet up for a server process, before it is imported there.

    The native server must not take this process over; operations run where they are called,
    which saves two thread switches an update; and each runs in one thread. OpenMP's threads wait
    for each other at the end of every operation. On a host whose cores are busy, as beside a
    worker, a round of small keys then takes ten times as long. OMP_NUM_THREADS is for the script.
    """
    os.environ["DMLC_ROLE"] = "worker"
    os.environ.setdefault("MXNET_ENGINE_TYPE", "NaiveEngine")
    os.environ["OMP_NUM_THREADS"] = "1"


WORKERS = (
    "run the optimizer on the workers: Trainer(..., update_on_kvstore=False); for Module, "
    "SVRGModule and FeedForward, MXNET_UPDATE_ON_KVSTORE=0 in the environment of all processes; a "
    "script that calls the store itself sets no optimizer and updates by the sums that it pulls"
)
SERVERS = (
    "let the servers update: Trainer without update_on_kvstore=False; Module without "
    "MXNET_UPDATE_ON_KVSTORE=0; in a script that calls the store itself, kv.set_optimizer"
)


ASYNC_TYPE = "dist_async_p3"
SYNC_TYPE = "dist_sync_p3"
