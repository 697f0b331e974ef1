"""One worker of a measured run in PyTorch: trains an emulated model with one of its systems.

Started by `experiments.campaign.job`; prints a JSON line when the measured iterations begin and
one, with the results, when they end. Its environment has no MXNet.
"""

import sys

from experiments.emulation.systems import SYSTEMS

_system = SYSTEMS[sys.argv[2]]
if _system.store == "p3":
    import p3kv.torch  # first, as in any script

import argparse  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import time  # noqa: E402
from typing import List, Tuple  # noqa: E402

import torch  # noqa: E402

from experiments.emulation.plain_layers import layers_from_text  # noqa: E402
from experiments.emulation.telling import rss_kib, say  # noqa: E402
from experiments.emulation.torch_model import Accelerator, Layer, units  # noqa: E402

_UNIT_BYTES = 4_000_000
"""FSDP2 gathers and scatters modules of so many bytes at least, as scripts shard blocks."""


def main() -> None:
    """Runs the iterations that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers")
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--dilation", type=float, default=1.0)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = layers_from_text(options.layers, options.dilation)
    accelerator = Accelerator()
    layers = [Layer(one, accelerator) for one in plain]
    arrays_rss_kib = rss_kib()
    rank, model, optimizer = synchronised(layers)
    x = torch.zeros(1, requires_grad=True)
    ends_s: List[float] = []
    for number in range(options.warm_up + options.iterations):
        if number == options.warm_up:
            say(event="begin", rank=rank)
        if not ends_s:
            ends_s.append(time.monotonic())
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        ends_s.append(time.monotonic())
    iteration_s = [end - begin for begin, end in zip(ends_s, ends_s[1:])]
    say(
        event="end",
        rank=rank,
        iteration_s=iteration_s[options.warm_up :],
        compute_s=sum(one.forward_s + one.backward_s for one in plain),
        arrays_rss_kib=arrays_rss_kib,
        versions={"torch": torch.__version__},
        max_rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        spans=[],
    )
    if _system.all_reduce:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def synchronised(
    layers: List[Layer],
) -> Tuple[int, torch.nn.Module, torch.optim.Optimizer]:
    """This worker's rank, and a model and an optimizer that the system keeps synchronous.

    All use plain SGD, so that the optimizer's own work does not decide.
    """
    if _system.store == "p3":
        model = torch.nn.Sequential(*layers)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return int(os.environ["DMLC_WORKER_ID"]), model, p3kv.torch.Optimizer(model, inner)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if _system.store == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers),
            bucket_cap_mb=_system.bucket_mb,
            gradient_as_bucket_view=True,  # which saves a copy
        )
        return rank, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*units(layers, _UNIT_BYTES))
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in model:
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return rank, model, torch.optim.SGD(model.parameters(), lr=0.1)


main()
