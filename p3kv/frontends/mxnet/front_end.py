"""MXNet's front end, for processes that have not imported MXNet."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from functools import partial
from types import ModuleType
from typing import Iterator, Mapping, Optional, Tuple

import numpy as np

from p3kv import config
from p3kv.common.registry import import_modules
from p3kv.common.words import Words
from p3kv.config import Launch
from p3kv.errors import in_one_line
from p3kv.frontends.front_end import FrontEnd, MakeModel
from p3kv.frontends.mxnet import environment
from p3kv.server.optimizer import MakeOptimizer, Optimizer

_CUDA_EXTRAS = "cu101, cu102, cu110, cu112 or cu117"


class MakeMXNetOptimizer(MakeOptimizer):
    """Imports MXNet into a server and makes its optimizer there."""

    def __call__(self) -> Optimizer:
        _import_mxnet()
        from p3kv.frontends.mxnet.optimizers.server_optimizer import MXNetOptimizer

        import_modules(config.optimizer_modules(), "P3KV_OPTIMIZERS")
        return MXNetOptimizer()

    def get_ready(self) -> None:
        if environment.update_on_kvstore_default():
            _import_mxnet()


class MXNet(FrontEnd):
    """`kvstore='p3'`, `'dist_sync_p3'` and `'dist_async_p3'`."""

    name = "mxnet"
    words = Words(
        use_store="kvstore='p3'",
        create_store="kvstore='p3' in gluon's Trainer, or mx.kv.create('p3')",
        first_use="mx.kv.create('p3') or Trainer.step",
        declare_key="kv.init or kv.broadcast",
        same_names="give the network a prefix, as in nn.HybridSequential(prefix='net_') with its "
        "layers made inside 'with net.name_scope()', or give gluon's Trainer "
        "list(net.collect_params().values()), whose order is not that of the names",
        synchronous="use kvstore='p3' with P3KV_CONSISTENCY=bulk_synchronous or none",
        set_optimizer="kv.set_optimizer",
        servers_update=environment.SERVERS,
        workers_update=environment.WORKERS,
        clip_on_workers="call kv.clip_global_norm(None), and clip the sums on the workers: with "
        "Trainer(..., update_on_kvstore=False), call trainer.allreduce_grads(), then "
        "gluon.utils.clip_global_norm(gradients, max_norm), then trainer.update(batch_size)",
        clip_own="gluon.utils.clip_global_norm",
        synchronise="kv.synchronize",
        own="dist_sync",
        later_engine="set MXNET_ENGINE_TYPE to another engine than NaiveEngine, or to none",
        native_store="MXNet's own store ('dist_sync', for example)",
        native_roles="'import mxnet' comes first, MXNet's own scheduler and servers run instead",
    )
    aliases = environment.ALIASES
    prefix = environment.PREFIX
    make_optimizer = MakeMXNetOptimizer
    model_names = (
        "alexnet", "densenet121", "densenet161", "densenet169", "densenet201", "inceptionv3",
        "mobilenet0.25", "mobilenet0.5", "mobilenet0.75", "mobilenet1.0", "mobilenetv2_0.25",
        "mobilenetv2_0.5", "mobilenetv2_0.75", "mobilenetv2_1.0", "resnet101_v1", "resnet101_v2",
        "resnet152_v1", "resnet152_v2", "resnet18_v1", "resnet18_v2", "resnet34_v1", "resnet34_v2",
        "resnet50_v1", "resnet50_v2", "squeezenet1.0", "squeezenet1.1", "vgg11", "vgg11_bn",
        "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn",
    )  # fmt: skip

    def attach(self) -> None:
        from p3kv.frontends.mxnet.registration import register

        register()

    def how_to_install(self) -> str:
        return (
            "p3kv's extras install it: pip install '.[cpu]' in p3kv's repository, or "
            f"{_CUDA_EXTRAS} instead of cpu for MXNet's CUDA builds"
        )

    def why_not(self) -> str:
        if sys.version_info >= (3, 12):
            this = ".".join(map(str, sys.version_info[:2]))
            return f"MXNet 1.9.1 runs on Python 3.8 to 3.11, so use one of these; this is {this}"
        # A script may have put back what NumPy 1.24 has removed.
        if _version_of(np) >= (1, 24) and not {"bool", "PZERO"} <= {*vars(np)}:
            return (
                "MXNet 1.9.1 needs names that NumPy has from 1.24 on no more, and this is NumPy "
                f"{np.__version__}: pip install 'numpy<1.24'"
            )
        return ""

    def came_too_early(self, role: str) -> Optional[str]:
        return (
            f"mxnet was imported before p3kv in a process with DMLC_ROLE={role}. Make 'import "
            "p3kv' the script's first import, or start it with 'p3kv run script.py', so that p3kv "
            f"takes the role over before MXNet's native {role} does."
        )

    def advice_for(self, error: BaseException) -> str:
        import mxnet as mx

        if "GPU" not in str(error) or mx.runtime.Features().is_enabled("CUDA"):
            return ""
        return (
            "this MXNet is the build for CPUs: pip uninstall it, and install one of p3kv's extras "
            f"{_CUDA_EXTRAS} in the place of cpu (docs/gpus.md says which)"
        )

    def take_native_role(self, launch: Launch, address: str) -> None:
        environment.listen_at(address)
        if launch.role != "worker":
            import mxnet  # noqa: F401  serves here, and ends the process

    def devices(self) -> str:
        import mxnet as mx

        if not mx.runtime.Features().is_enabled("CUDA"):
            return "this mxnet is the build for CPUs"
        try:
            return f"this mxnet is a CUDA build, and sees {mx.context.num_gpus()} GPUs"
        except mx.MXNetError as error:  # no driver, for example
            return f"this mxnet is a CUDA build, and sees no GPU: {in_one_line(error)}"

    def known_models(self) -> Mapping[str, MakeModel]:
        from p3kv.frontends.mxnet import layers

        return {name: partial(layers.model, name) for name in self.model_names}


def _version_of(package: ModuleType) -> Tuple[int, ...]:
    return tuple(map(int, package.__version__.split(".")[:2]))


def _import_mxnet() -> None:
    """Imports MXNet without the store, and starts what it starts at first use. It takes seconds.

    A thread may call it while the main thread serves inside the import of p3kv. So nothing here
    imports a module of p3kv's: it would wait for that import to end.
    """
    environment.prepare_for_server_optimizer()
    with _stderr_without(b"MXNet start using engine"):
        import mxnet

        mxnet.nd.waitall()


@contextlib.contextmanager
def _stderr_without(unwanted: bytes) -> Iterator[None]:
    """Drops certain lines that a library writes to this process's standard error."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            written.seek(0)
            os.write(2, b"".join(line for line in written if unwanted not in line))
