"""The systems that are compared: how their processes start and what their workers call."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

_HOROVOD = Path(__file__).parent.parent.parent / ".horovod" / "environment"


class System(NamedTuple):
    """A store and the way it is used.

    `store` is what `mx.kv.create` gets. MXNet's own servers start when mxnet is imported in a
    server's role, p3kv's when p3kv is. "horovod" is no store but Horovod's all-reduce, which has no
    servers, and an environment of its own.

    `worker_copies` is how often a worker holds the model's bytes, as measured with VGG-19: weights
    and gradients, and what the store copies of them.
    """

    title: str
    store: str
    environment: Dict[str, str]
    worker_copies: int = 4
    update_on_kvstore: bool = True
    apart: bool = False

    @property
    def all_reduce(self) -> bool:
        """Whether workers reduce among themselves, without servers."""
        return self.store == "horovod"

    @property
    def python(self) -> str:
        """What runs its processes."""
        return str(_HOROVOD / "bin" / "python") if self.all_reduce else sys.executable

    @property
    def missing(self) -> Optional[str]:
        """A sentence that says what to do before the system can run here, or None when it can."""
        if self.all_reduce and not (_HOROVOD / "horovod-is-ready").exists():
            return "Horovod is not there yet: ./scripts/horovod builds it, once, in 4 to 8 minutes"
        return None

    @property
    def role_command(self) -> List[str]:
        """What a scheduler or server runs."""
        module = "p3kv" if self.store == "p3" else "mxnet"
        return [sys.executable, "-c", f"import {module}"]


SYSTEMS = {
    "dist_sync": System("MXNet dist_sync", "dist_sync", {}),
    "dist_sync_apart": System("MXNet dist_sync, push and pull apart", "dist_sync", {}, apart=True),
    # It updates on the workers only, and P3 launchers of MXNet set this mark: its best setting.
    "mxnet_p3": System(
        "MXNet's shipped P3",
        "dist_sync",
        {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"},
        update_on_kvstore=False,
    ),
    "slicing": System("p3kv, slicing only", "p3", {"P3KV_PRIORITIES": "0"}, 2),
    "p3kv": System("p3kv", "p3", {}, 2),
    # gloo gives up after 30 s without a byte, which dilated computation of 16 hosts takes.
    "horovod": System(
        "Horovod with gloo",
        "horovod",
        {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600"},
        3,
        update_on_kvstore=False,
    ),
}

USUAL = tuple(name for name, system in SYSTEMS.items() if not system.all_reduce)
"""What needs nothing beside p3kv's own environment."""


def import_p3kv(system: System) -> None:
    """Imports p3kv in a worker of `system`, before mxnet, as in any script.

    Its engine operations serve under every system; only where its own store is meant is it told
    its role.
    """
    role = None if system.store == "p3" else os.environ.pop("DMLC_ROLE", None)
    importlib.import_module("p3kv")
    if role is not None:
        os.environ["DMLC_ROLE"] = role
