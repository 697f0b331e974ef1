"""The front end as processes know it that have not imported torch."""

from __future__ import annotations

import importlib
import importlib.util
from datetime import timedelta
from typing import Mapping, Optional

from p3kv.common.words import Words
from p3kv.config import Launch
from p3kv.frontends.front_end import FrontEnd, KeyStore
from p3kv.frontends.torch.environment import talk_at
from p3kv.frontends.torch.optimizers import no_compiler
from p3kv.server.optimizer import MakeOptimizer, Optimizer
from p3kv.worker import this_process

_ADVICE = {
    "process group has not been initialized": "p3kv.torch needs no process group: give "
    "DistributedSampler num_replicas=optimizer.num_workers and rank=optimizer.rank; for other "
    "uses, torch.distributed.init_process_group() makes one",
    "has no attribute 'no_sync'": "p3kv.torch wraps no model: write optimizer.no_sync()",
    "has no attribute 'module'": "p3kv.torch wraps no model: where it was in "
    "DistributedDataParallel, leave .module out",
}
"""By a part of an error's message: what to do where a script was written for
DistributedDataParallel."""

_CONNECT_S = 15.0
"""torchrun's agent has its store before it starts a rank. torch tries twice, and pauses between."""


class MakeTorchOptimizer(MakeOptimizer):
    """Makes what runs `torch.optim`'s optimizers on a server."""

    def __call__(self) -> Optimizer:
        no_compiler.leave_out()
        from p3kv.frontends.torch.optimizers.server_optimizer import TorchOptimizer

        return TorchOptimizer()

    def get_ready(self) -> None:
        """Imports torch where there is no other framework of p3kv's. Else a server does not know
        yet whether its job is torch's, and the import takes seconds and hundreds of megabytes."""
        if importlib.util.find_spec("mxnet") is None:
            importlib.import_module("torch")


class Torch(FrontEnd):
    """`p3kv.torch.Optimizer`."""

    name = "torch"
    words = Words(
        use_store="p3kv.torch.Optimizer",
        create_store="p3kv.torch.Optimizer(model, optimizer)",
        first_use="p3kv.torch.Optimizer",
        same_names="make the optimizer with the same parameters in the same order",
        synchronous="use the consistency bulk_synchronous",
        servers_update="let the servers update: P3KV_UPDATES=servers, or updates='servers'",
        clip_own="opt.clip_grad_norm_",
        synchronise="opt.synchronize",
        own="DDP",
    )
    aliases: Mapping[str, str] = {}
    prefix = "TORCH_"
    make_optimizer = MakeTorchOptimizer

    def attach(self) -> None:
        """Has a worker warn whose script steps other optimizers and makes none of p3kv's, and a
        process group of the script's own talk where p3kv does."""
        if this_process.is_worker():
            talk_at(this_process.worker().address)
            from p3kv.frontends.torch.refusals import watch_steps

            watch_steps()

    def take_native_role(self, launch: Launch, address: str) -> None:
        if launch.role != "server":
            from p3kv.frontends.torch import trials

            trials.take_native_role(launch, address)

    def launcher_store(self, host: str, port: int, timeout_s: float) -> Optional[KeyStore]:
        if importlib.util.find_spec("torch") is None:
            return None
        from torch.distributed import TCPStore

        connect_s = timedelta(seconds=min(timeout_s, _CONNECT_S))
        store = TCPStore(host, port, is_master=False, timeout=connect_s, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=timeout_s))
        found: KeyStore = store
        return found

    def how_to_install(self) -> str:
        return "pip install '.[torch]' in p3kv's repository"

    def advice_for(self, error: BaseException) -> str:
        return next((advice for said, advice in _ADVICE.items() if said in str(error)), "")

    def came_too_early(self, role: str) -> Optional[str]:
        return None
