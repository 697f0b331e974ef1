"""One worker that trains a small GPT on the characters of Python's library, in PyTorch.

Started by `experiments.campaign.job`; prints a JSON line when training begins and one, with the
results, when it ends.
"""

import sys

from experiments.emulation.systems import SYSTEMS

_system = SYSTEMS[sys.argv[1]]
if _system.store == "p3":
    import p3kv.torch  # first, as in any script

import argparse  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
from typing import List, Tuple  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from experiments.emulation.telling import say  # noqa: E402
from experiments.training.data import ALPHABET, source_text  # noqa: E402

CONTEXT, BATCH = 64, 16
_WIDTH, _BLOCKS, _HEADS = 256, 4, 4
_ELEMS = 400_000
_SEED = 7


class GPT(nn.Module):
    """A transformer that reads to the left, with a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), _WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, _WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(_BLOCKS)
        )  # fmt: skip
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, len(ALPHABET), bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    data = source_text(CONTEXT, _ELEMS, 0)
    rank, model, optimizer = synchronised(GPT())
    random = np.random.RandomState(_SEED)
    losses: List[float] = []
    ends_s: List[float] = []
    say(event="begin")
    began = time.perf_counter()
    for _ in range(options.steps):
        batches = random.choice(len(data.training), (options.workers, BATCH), replace=False)
        mine = batches[rank : rank + options.joined].reshape(-1)
        text = torch.from_numpy(data.training[mine]).long()
        labels = torch.from_numpy(data.training_labels[mine]).long()
        optimizer.zero_grad()
        scores = model(text)
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ends_s.append(time.perf_counter() - began)
    say(
        event="end",
        rank=rank,
        losses=losses,
        ends_s=ends_s,
        elems=sum(parameter.numel() for parameter in model.parameters()),
    )
    if _system.all_reduce:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def synchronised(model: nn.Module) -> Tuple[int, nn.Module, torch.optim.Optimizer]:
    """This worker's rank, and a model and an optimizer that the system keeps synchronous."""
    if _system.store == "p3":
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return int(os.environ["DMLC_WORKER_ID"]), model, p3kv.torch.Optimizer(model, inner)
    torch.distributed.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=_system.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    return torch.distributed.get_rank(), wrapped, optimizer


main()
