"""MXNet's own environment variables, read and set in this one place."""

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
