"""One worker that trains a small GPT on the characters of Python's library, in PyTorch.

`--loop` is what its script does beside training, such as clipping, in each step.

Started by `experiments.campaign.job`; prints a JSON line when training begins and one, with the
results, when it ends.
"""

import sys

from experiments.emulation.systems import SYSTEMS

_system = SYSTEMS[sys.argv[1]]
if _system.store == "p3":
    import p3kv.torch  # first, as in any script

import argparse  # noqa: E402
import contextlib  # noqa: E402
import math  # noqa: E402
import time  # noqa: E402
from typing import Any, List, Tuple  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from experiments.emulation.telling import say  # noqa: E402
from experiments.training.data import ALPHABET, source_text  # noqa: E402

CONTEXT, BATCH = 64, 16
_HEADS = 4
_ELEMS = 400_000
_VALIDATION_ELEMS = 16_384
LOOPS = ("plain", "clip", "read_norm", "skip", "scale", "read_weights", "average")
_SEED = 7


class GPT(nn.Module):
    """A transformer that reads to the left, with a tied embedding."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, _HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], text.device)
        x = self.characters(text) + self.places
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores


def main() -> None:
    """Trains as the command line asks for: `workers` read a step's batches, and this process reads
    those of `--joined` of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("workers", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--joined", type=int, default=1)
    parser.add_argument("--loop", choices=LOOPS, default="plain")
    parser.add_argument("--passes", type=int, default=1, help="backward passes of a step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=BATCH, help="windows of text of a worker")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--zero", action="store_true", help="DDP: ZeroRedundancyOptimizer")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data = source_text(CONTEXT, _ELEMS, _VALIDATION_ELEMS)
    device = torch.device(options.device)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as forgets:
        forgets.write("5")  # what VmHWM was until now
    before_kib = _memory_kib("VmRSS")
    gpt = GPT(options.width, options.blocks).to(device)
    rank, model, optimizer = synchronised(gpt, options.zero)
    script = _Script(options.loop, model, optimizer)
    random = np.random.RandomState(options.seed)
    losses: List[float] = []
    ends_s: List[float] = []
    say(event="begin")
    began = time.perf_counter()
    for _ in range(options.steps):
        optimizer.zero_grad()
        of_passes = []
        for number in range(options.passes):
            batches = random.choice(
                len(data.training), (options.workers, options.batch), replace=False
            )
            mine = batches[rank : rank + options.joined].reshape(-1)
            with contextlib.nullcontext() if number + 1 == options.passes else script.no_sync():
                loss = loss_of(model, data.training[mine], data.training_labels[mine])
                script.scaled(loss / options.passes).backward()
            of_passes.append(loss.item())
        script.step(of_passes[-1])
        losses.append(sum(of_passes) / options.passes)
        ends_s.append(time.perf_counter() - began)
    if _system.store == "p3":
        optimizer.synchronize()
    memory_kib = _memory_kib("VmHWM") - before_kib
    with torch.no_grad():
        validation = loss_of(model, data.validation, data.validation_labels).item()
    say(
        event="end",
        rank=rank,
        losses=losses,
        ends_s=ends_s,
        validation=validation,
        elems=sum(parameter.numel() for parameter in model.parameters()),
        memory_kib=memory_kib,
        device_bytes=0 if device.type == "cpu" else torch.cuda.max_memory_allocated(device),
    )
    if _system.all_reduce:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def loss_of(model: nn.Module, text: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """Mean loss of the next characters, in nats."""
    device = next(model.parameters()).device
    read, next_read = (torch.from_numpy(one).long().to(device) for one in (text, labels))
    return functional.cross_entropy(model(read).flatten(0, 1), next_read.flatten())


class _Script:
    """What the script does in each step beside its backward passes."""

    def __init__(self, loop: str, model: nn.Module, optimizer: Any) -> None:
        self._loop = loop
        self._model = model
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler("cpu", enabled=loop == "scale")
        self._averages = [parameter.detach().clone() for parameter in model.parameters()]

    def no_sync(self) -> Any:
        return (self._optimizer if _system.store == "p3" else self._model).no_sync()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def step(self, loss: float) -> None:
        self._scaler.unscale_(self._optimizer)
        norm = self._clip() if self._loop in ("clip", "read_norm", "scale") else None
        if self._loop != "skip" or not self._skips(not math.isfinite(loss)):
            self._scaler.step(self._optimizer)
        self._scaler.update()
        if norm is not None and self._loop == "read_norm":
            norm.item()
        if self._loop == "read_weights":  # as for a log, or a penalty
            sum(parameter.detach().norm().item() for parameter in self._model.parameters())
        if self._loop == "average":
            weights = [parameter.detach() for parameter in self._model.parameters()]
            torch._foreach_lerp_(self._averages, weights, 0.01)

    def _skips(self, is_bad: bool) -> bool:
        """Whether not to step: p3kv's own step leaves out what is bad."""
        if _system.store == "p3":
            self._optimizer.skip_step(is_bad)
            return False
        any_bad = torch.tensor(float(is_bad))
        torch.distributed.all_reduce(any_bad)
        return bool(any_bad)

    def _clip(self) -> torch.Tensor:
        if _system.store == "p3":
            norm: torch.Tensor = self._optimizer.clip_grad_norm_(1.0)
            return norm
        return nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)


def _memory_kib(what: str) -> int:
    """This process's memory now (VmRSS) or at most (VmHWM)."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what))


def synchronised(
    model: nn.Module, by_zero: bool = False
) -> Tuple[int, nn.Module, torch.optim.Optimizer]:
    """This worker's rank, and a model and an optimizer that the system keeps synchronous."""
    if _system.store == "p3":
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        updates = None if _system.update_on_kvstore else "workers"
        optimizer = p3kv.torch.Optimizer(model, inner, updates=updates)
        return optimizer.rank, model, optimizer
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if _system.store == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return rank, model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=_system.bucket_mb, gradient_as_bucket_view=True
    )
    if by_zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return (
            rank,
            wrapped,
            ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3),
        )
    return rank, wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3)


main()
