"""The systems that are compared: how their processes start and what their workers call."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

_HOROVOD = Path(__file__).parent.parent.parent / ".horovod" / "environment"


class System(NamedTuple):
    """A store and the way it is used.

    `store` is what `mx.kv.create` gets. MXNet's own servers start when mxnet is imported in a
    server's role, p3kv's when p3kv is. "horovod" is no store but Horovod's all-reduce, which has no
    servers, and an environment of its own.

    `apart` and `in_turn` are those of `experiments.emulation.emulator`. `compression` is given to
    `set_gradient_compression`, and `momentum` to SGD on the servers.

    `worker_copies` is how often a worker holds the model's bytes, as measured with VGG-19: weights
    and gradients, and what the store copies of them.
    """

    title: str
    store: str
    environment: Dict[str, str]
    worker_copies: int = 4
    update_on_kvstore: bool = True
    apart: bool = False
    in_turn: bool = False
    compression: Mapping[str, object] = MappingProxyType({})
    momentum: float = 0.0

    @property
    def encodes(self) -> bool:
        """Whether what travels, and what that costs, may depend on the numbers."""
        return bool(self.compression) or any(name.endswith("_CODEC") for name in self.environment)

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


_TWO_BITS = 0.01


def _encoded(
    title: str, gradients: str, values: str = "identity", worker_copies: int = 2, **how: Any
) -> System:
    """p3kv with codecs, each a name or a name with parameters."""
    codecs = {"P3KV_GRADIENT_CODEC": gradients, "P3KV_VALUE_CODEC": values}
    return System(f"p3kv, {title}", "p3", codecs, worker_copies, **how)


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
    "p3kv_in_turn": System("p3kv, computing and sending in turn", "p3", {}, 2, in_turn=True),
    "dist_sync_2bit": System(
        "MXNet dist_sync, 2-bit",
        "dist_sync",
        {},
        5,
        apart=True,  # MXNet's pushpull refuses to compress
        compression={"type": "2bit", "threshold": _TWO_BITS},
    ),
    "p3kv_float16": _encoded("float16 both ways", "float16", "float16"),
    "p3kv_bfloat16": _encoded("bfloat16 both ways", "bfloat16", "bfloat16"),
    "p3kv_2bit": _encoded("2-bit gradients", f"2bit:threshold={_TWO_BITS}", worker_copies=3),
    "p3kv_topk_gradients": _encoded("top-1 % gradients", "topk:share=0.01", worker_copies=3),
    # A worker keeps what it has of the values, and servers do so for each worker.
    "p3kv_topk": _encoded("top-1 % both ways", "topk:share=0.01", "topk:share=0.01", 5),
    "p3kv_dgc": _encoded("DGC 99.9 % gradients", "dgc:share=0.001", worker_copies=4, momentum=0.9),
    "p3kv_dgc_topk": _encoded(
        "DGC, top-1 % values", "dgc:share=0.001", "topk:share=0.01", 6, momentum=0.9
    ),
}

USUAL = ("dist_sync", "dist_sync_apart", "mxnet_p3", "slicing", "p3kv")
"""The exact systems that need nothing beside p3kv's own environment."""


def import_p3kv(system: System) -> None:
    """Imports p3kv in a worker of `system`, before mxnet, as in any script.

    Its engine operations serve under every system; only where its own store is meant is it told
    its role.
    """
    role = None if system.store == "p3" else os.environ.pop("DMLC_ROLE", None)
    importlib.import_module("p3kv")
    if role is not None:
        os.environ["DMLC_ROLE"] = role
