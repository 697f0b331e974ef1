"""The systems that are compared: how their processes start and what their workers call."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

_ROOT = Path(__file__).parent.parent.parent
_HOROVOD = _ROOT / ".horovod" / "environment"
_TORCH = _ROOT / ".torch"
_TORCH_IS_HERE = importlib.util.find_spec("torch") is not None


class System(NamedTuple):
    """A store and the way it is used.

    `store` is what `mx.kv.create` gets. MXNet's own servers start when mxnet is imported in a
    server's role, p3kv's when p3kv is. "horovod" is no store but Horovod's all-reduce, which has no
    servers, and an environment of its own. Systems `in_torch` run in PyTorch's environment, and
    their store is "p3", "ddp", "fsdp2", or "none" for a single process; `bucket_mb` is
    DistributedDataParallel's `bucket_cap_mb`.

    `apart` and `in_turn` are those of `experiments.emulation.emulator`. `compression` is given to
    `set_gradient_compression`, and `momentum` to SGD on the servers.

    `straggling` is the share of a worker's iterations that take twice as long.

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
    straggling: float = 0.0
    in_torch: bool = False
    bucket_mb: float = 25.0

    @property
    def encodes(self) -> bool:
        """Whether what travels, and what that costs, may depend on the numbers."""
        return bool(self.compression) or any(name.endswith("_CODEC") for name in self.environment)

    @property
    def all_reduce(self) -> bool:
        """Whether workers reduce among themselves, without servers."""
        return self.store in ("horovod", "ddp", "fsdp2", "none")

    @property
    def python(self) -> str:
        """What runs its processes."""
        if self.in_torch:
            return sys.executable if _TORCH_IS_HERE else str(_TORCH / "bin" / "python")
        return str(_HOROVOD / "bin" / "python") if self.all_reduce else sys.executable

    @property
    def missing(self) -> Optional[str]:
        """A sentence that says what to do before the system can run here, or None when it can."""
        if self.in_torch:
            if not _TORCH_IS_HERE and not (_TORCH / "installed-by-p3kv").exists():
                return "PyTorch is not there yet: ./scripts/test installs it into .torch"
        elif self.all_reduce and not (_HOROVOD / "horovod-is-ready").exists():
            return "Horovod is not there yet: ./scripts/horovod builds it, once, in 4 to 8 minutes"
        return None

    @property
    def role_command(self) -> List[str]:
        """What a scheduler or server runs."""
        module = "p3kv" if self.store == "p3" else "mxnet"
        return [self.python, "-c", f"import {module}"]


_TWO_BITS = 0.01
_TOP = "topk:share=0.01"


def _encoded(
    title: str,
    gradients: str,
    values: str = "identity",
    worker_copies: int = 2,
    rule: str = "bulk_synchronous",
    **how: Any,
) -> System:
    """p3kv with codecs, each a name or a name with parameters, and by a consistency rule."""
    environment = {
        "P3KV_GRADIENT_CODEC": gradients,
        "P3KV_VALUE_CODEC": values,
        "P3KV_CONSISTENCY": rule,
    }
    return System(f"p3kv, {title}", "p3", environment, worker_copies, **how)


def _by_rule(rule: str, title: str, worker_copies: int, straggling: float = 0.0) -> System:
    """p3kv by a consistency rule."""
    environment = {"P3KV_CONSISTENCY": rule}
    return System(f"p3kv, {title}", "p3", environment, worker_copies, straggling=straggling)


_STALE = "bounded:staleness=5,lazy=1"
_STRAGGLING = 0.2
_LOCAL = "local:steps=50,streaming=true"


def _ddp(bucket_mb: float) -> System:
    title = f"DDP with gloo, buckets of {bucket_mb:g} MB"
    return System(title, "ddp", {}, 4, in_torch=True, bucket_mb=bucket_mb)


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
    "p3kv_topk": _encoded("top-1 % both ways", _TOP, _TOP, 5),
    "p3kv_dgc": _encoded("DGC 99.9 % gradients", "dgc:share=0.001", worker_copies=4, momentum=0.9),
    "p3kv_dgc_topk": _encoded(
        "DGC, top-1 % values", "dgc:share=0.001", "topk:share=0.01", 6, momentum=0.9
    ),
    "p3kv_stale": _by_rule(_STALE, "staleness 5", 3),
    "p3kv_all": _encoded("top-1 % both ways, staleness 5", _TOP, _TOP, 6, rule=_STALE),
    "delayed_1": _by_rule("delayed:staleness=1", "delayed by 1", 6),
    "local_50": _by_rule(_LOCAL, "50 local steps, streaming", 6),
    "straggling": _by_rule("bulk_synchronous", "synchronous", 2, _STRAGGLING),
    "straggling_bounded_3": _by_rule("bounded:staleness=3", "bounded by 3", 2, _STRAGGLING),
    "straggling_delayed_3": _by_rule("delayed:staleness=3", "delayed by 3", 10, _STRAGGLING),
    "p3kv_torch": System("p3kv.torch", "p3", {}, 3, in_torch=True),
    "p3kv_torch_workers": System(
        "p3kv.torch, updates on workers", "p3", {}, 4, update_on_kvstore=False, in_torch=True
    ),
    "ddp_25mb": _ddp(25),
    "ddp_5mb": _ddp(5),
    "ddp_1mb": _ddp(1),
    "torch_alone": System("PyTorch in one process", "none", {}, 3, in_torch=True),
    "fsdp2": System("FSDP2 with gloo", "fsdp2", {}, 5, in_torch=True),
}

USUAL = ("dist_sync", "dist_sync_apart", "mxnet_p3", "slicing", "p3kv")
"""The exact systems that need nothing beside p3kv's own environment."""

IN_TORCH = ("p3kv_torch", "ddp_25mb", "ddp_5mb", "ddp_1mb", "fsdp2")
"""The systems of PyTorch, as far as they synchronise exactly in each step."""


def import_p3kv(system: System) -> None:
    """Imports p3kv in a worker of `system`, before mxnet, as in any script.

    Its engine operations serve under every system; only where its own store is meant is it told
    its role.
    """
    role = None if system.store == "p3" else os.environ.pop("DMLC_ROLE", None)
    importlib.import_module("p3kv")
    if role is not None:
        os.environ["DMLC_ROLE"] = role
