"""Workers have different numbers of batches in each epoch: the numbers of one process.

Argument: by what the mean is divided: "all", "present", or "samples", where steps are clipped, too;
"clipped" beside all; "scaled" beside all, by a scaler of losses; "refused", where a worker has no
batch left.
"""

import p3kv.torch  # noqa: I001
import contextlib
import copy
import sys
from typing import Any, List, Optional

import torch
from p3kv.errors import ConfigError, NotSupportedError
from torch import nn
from torch_refusals import refused

HOW = sys.argv[1]
CLIPS = HOW in ("clipped", "samples")
SCALES = HOW == "scaled"
OVERFLOWS = 6, 11
"""Steps of which the last worker's loss is infinite, while others have no batch."""
EPOCHS = [(3, 3, 3), (5, 2, 4), (1, 3, 3), (0, 2, 0), (2, 0, 1)]
"""By epoch and rank."""


class Net(nn.Module):
    """Sparse rows, statistics, and a layer that workers of odd rank use in odd steps only."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(12, 4, sparse=sparse)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_last: bool) -> torch.Tensor:
        x = self.norm(self.first(self.embedding(x))).tanh()
        return (self.last(x) if uses_last else x).square().mean()


def samples(step: int, rank: int) -> int:
    return 4 + (step + rank) % 3


def loss(net: Net, step: int, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randint(12, (samples(step, rank),), generator=made)
    return net(batch, rank % 2 == 0 or step % 2 == 1)


def optimizers(net: Net) -> List[torch.optim.Optimizer]:
    others = [one for name, one in net.named_parameters() if "embedding" not in name]
    return [
        torch.optim.SGD(net.embedding.parameters(), lr=0.1),
        torch.optim.SGD(others, lr=0.1, momentum=0.5),
    ]


class Scalers:
    """One for each of two optimizers, which count alike."""

    def __init__(self) -> None:
        self._of = [
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=SCALES)
            for _ in range(2)
        ]

    def scaled(self, value: torch.Tensor, step: int, is_last: bool) -> torch.Tensor:
        self._of[1].scale(torch.zeros(()))
        value = self._of[0].scale(value)
        return value * float("inf") if SCALES and step in OVERFLOWS and is_last else value

    def step(self, optimizers: List[Any]) -> None:
        for scaler, optimizer in zip(self._of, optimizers):
            scaler.step(optimizer)
        for scaler in self._of:
            scaler.update()

    @property
    def scales(self) -> List[float]:
        return [one.get_scale() for one in self._of]


def step_alone(
    net: Net,
    alone: List[torch.optim.Optimizer],
    scalers: Scalers,
    step: int,
    present: List[int],
    workers: int,
) -> None:
    """The step of those that have a batch; the statistics are the last one's."""
    weights = [float(samples(step, one)) if HOW == "samples" else 1.0 for one in present]
    divisor = workers if HOW in ("all", "clipped", "scaled") else sum(weights)
    net.zero_grad()
    before = copy.deepcopy(net.norm.state_dict())
    after: Optional[dict] = None
    for weight, rank in zip(weights, present):
        net.norm.load_state_dict({**net.norm.state_dict(), **buffers(before)})
        value = loss(net, step, rank) * weight / divisor
        scalers.scaled(value, step, rank == present[-1]).backward()
        after = copy.deepcopy(net.norm.state_dict())
    assert after is not None
    net.norm.load_state_dict({**net.norm.state_dict(), **buffers(after)})
    if CLIPS:
        nn.utils.clip_grad_norm_(alone[1].param_groups[0]["params"], 0.05)
    scalers.step(alone)


def buffers(state: dict) -> dict:
    return {name: value for name, value in state.items() if "running" in name or "num_" in name}


def train(net: Net, mine: List[Any], scalers: Scalers, step: int, rank: int, is_last: bool) -> None:
    for optimizer in mine:
        optimizer.zero_grad()
        if HOW == "samples":
            optimizer.weigh(samples(step, rank))
    scalers.scaled(loss(net, step, rank), step, is_last).backward()
    if CLIPS:
        mine[1].clip_grad_norm_(0.05)
    scalers.step(mine)


def same(net: Net, twin: Net) -> None:
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)


def main() -> None:
    net, twin = Net(), Net(sparse=False)
    twin.load_state_dict(copy.deepcopy(net.state_dict()))
    mine, alone = [p3kv.torch.Optimizer(net, one) for one in optimizers(net)], optimizers(twin)
    rank, workers = mine[0].rank, mine[0].num_workers
    counts = HOW in ("all", "clipped", "scaled", "refused")
    scalers, its = Scalers(), Scalers()
    first = 0
    for epoch, batches in enumerate(EPOCHS):
        with contextlib.ExitStack() as stack:
            for optimizer in mine:
                stack.enter_context(optimizer.join(counts, True, HOW == "refused"))
            if epoch == 0:
                refused("leave the inner out", mine[0].join().__enter__, kind=NotSupportedError)
                if counts and HOW != "refused":
                    words = "use opt.join(divide_by_initial_world_size=False)"
                    refused(words, mine[0].weigh, 2, kind=ConfigError)
            for step in range(first, first + batches[rank]):
                present = [one for one, number in enumerate(batches) if step - first < number]
                train(net, mine, scalers, step, rank, rank == present[-1])
        for step in range(first, first + max(batches)):
            present = [one for one, number in enumerate(batches) if step - first < number]
            step_alone(twin, alone, its, step, present, workers)
        same(net, twin)
        assert scalers.scales == its.scales, (epoch, scalers.scales, its.scales)
        first += max(batches)
    if SCALES:
        assert scalers.scales[0] not in (1.0, 1024.0)
    if HOW == "present":
        with mine[0].join(), mine[1].join():  # which steps that were not weighed allow
            pass
    if HOW == "all":
        with mine[0].join(), mine[1].join():
            for step in range(first, first + 1 + (rank > 0)):
                train(net, mine, scalers, step, rank, False)
                mine[1].param_groups[0]["lr"] *= 0.5  # worker 0 won't for the second
    print(f"worker {rank} is right with {sum(one[rank] for one in EPOCHS)} batches")


main()
