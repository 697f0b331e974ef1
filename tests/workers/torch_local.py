"""Trains with p3kv.torch by the rule `local`, and compares with the same training of all workers
in this process, bit for bit. P3KV_CONSISTENCY says how many steps there are between exchanges.

Where the job goes on from a checkpoint, only the rest of the steps is trained. Arguments: after how
many steps to end, unless after all, when two checkpoints are complete; the rank of the worker that
ends then, if the others do not.
"""

import p3kv.torch  # noqa: I001
import hashlib
import os
import sys
from typing import Any, List

import torch
from complete import Complete
from outer_reference import Outer
from p3kv.consistency import make_consistency
from p3kv.store.turns import turns
from p3kv.worker import this_process

STEPS, BATCH = 17, 8
PAUSE = range(12, 17)
LAST = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
LEAVER = int(sys.argv[2]) if len(sys.argv) > 2 else None
RULE = make_consistency(os.environ["P3KV_CONSISTENCY"], 1).local
assert RULE is not None


class Net(torch.nn.Module):
    """With a layer that only some steps use, statistics, a weight that nobody trains, and one that
    is frozen for a while, when its value is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 16)
        self.hidden = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.seldom = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Parameter(torch.randn(16), requires_grad=False)
        self.out = torch.nn.Linear(16, 3)
        self.out.weight.data = self.out.weight.data.t().contiguous().t()  # with other strides

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.norm(torch.relu(self.hidden(self.embedding(x) + self.frozen)))
        return self.out(x + self.seldom(x) if uses_all else x)

    def pause(self, step: int) -> None:
        self.hidden.bias.requires_grad_(step not in PAUSE)


def backward(net: Net, step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randint(30, (BATCH,), generator=random)
    y = torch.randint(3, (BATCH,), generator=random)
    loss = torch.nn.functional.cross_entropy(net(x, step % 4 == rank), y)
    loss.backward()
    return loss


def made(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


class Together:
    """All workers and the servers, in this process."""

    def __init__(self, net: Net, workers: int) -> None:
        self.nets = [Net() for _ in range(workers)]
        for one in self.nets:
            one.load_state_dict(net.state_dict())
        self.optimizers = [made(one) for one in self.nets]
        self.schedules = [torch.optim.lr_scheduler.StepLR(one, 5, 0.5) for one in self.optimizers]
        every = [*net.parameters()]
        whole = turns([one.nbytes for one in every], RULE)
        self.outer = Outer(RULE, whole, [one.detach().numpy().copy() for one in every])

    def step(self, step: int) -> None:
        there = [rank for rank in range(len(self.nets)) if rank != LEAVER or step <= LAST]
        for rank in there:
            net, optimizer = self.nets[rank], self.optimizers[rank]
            optimizer.zero_grad()
            net.pause(step)
            backward(net, step, rank)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            self._multiply_learned(net, len(self.nets))
            optimizer.step()
            self._multiply_learned(net, 1 / len(self.nets))
            self.schedules[rank].step()
        for at, weights in enumerate(zip(*(net.parameters() for net in self.nets))):
            learned = {rank: weights[rank].detach().numpy() for rank in there}
            trains = weights[there[0]].requires_grad
            for rank, now in self.outer.exchange(step, at, learned, trains).items():
                weights[rank].data.copy_(torch.from_numpy(now))

    def average(self) -> None:
        for at, weights in enumerate(zip(*(net.parameters() for net in self.nets))):
            if weights[0].requires_grad:
                learned = {rank: one.detach().numpy() for rank, one in enumerate(weights)}
                self.outer.average(at, learned)
        self.take_values()

    def take_values(self) -> None:
        for value, weights in zip(self.outer.values, zip(*(net.parameters() for net in self.nets))):
            for one in weights:
                if one.requires_grad:
                    one.data.copy_(torch.from_numpy(value))

    def _multiply_learned(self, net: Net, by: float) -> None:
        """Where changes add up: what a worker does counts with its part."""
        for value, parameter in zip(self.outer.values, net.parameters()):
            if RULE.adds and parameter.grad is not None:
                base = torch.from_numpy(value)
                parameter.data.sub_(base).mul_(by).add_(base)


def main() -> None:
    complete = Complete()
    torch.manual_seed(7 if os.environ.get("DMLC_WORKER_ID", "0") == "0" else os.getpid())
    net = Net()
    optimizer = p3kv.torch.Optimizer(net, made(net))
    rank, workers = optimizer.rank, optimizer.num_workers
    torch.manual_seed(7)
    together = Together(Net(), workers)  # with worker 0's
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    begun = optimizer.resumed_steps
    for step in range(1, 1 + (LAST if LEAVER in (None, rank) else STEPS)):
        optimizer.zero_grad()
        if step == 3:  # a script may
            for other, one in [(rank, net)] * (step > begun) + [*enumerate(together.nets)]:
                one.frozen.data.add_(other)
        if step <= begun:
            schedule.step()
            together.step(step)
            continue
        net.pause(step)
        loss = backward(net, step, rank)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert optimizer.step(lambda loss=loss: loss) is loss
        schedule.step()
        together.step(step)
        if step == 9:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)  # this worker's own
        if LAST < STEPS and LEAVER is None and rank == 0 and step in (6, LAST):
            complete.wait(2 if step == LAST else 1)
    if LEAVER is None:
        this_process.worker().barrier()
    bits = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in net.parameters()))
    print(f"ends with {bits.hexdigest()}")
    if "topk" in os.environ.get("P3KV_VALUE_CODEC", "") or begun == LAST:
        return  # what it comes to, one process does not compute
    same([*net.parameters()], [*together.nets[rank].parameters()])
    if rank == LEAVER:
        print("right until the end")
        return  # the others go on
    if not begun or rank == 0:  # whose buffers all begin with
        same([*net.buffers()], [*together.nets[rank].buffers()])
    optimizer.synchronize()
    for at, one in enumerate(net.parameters()):
        if one.requires_grad:
            same([one], [torch.from_numpy(together.outer.values[at])])
    if LAST == STEPS and LEAVER is None and not begun:
        exchanges(net, optimizer, schedule, together)
        if RULE.adds:
            count_once()
    print(f"right by the rule local, after {begun} steps")


def exchanges(net: Net, optimizer: Any, schedule: Any, together: Together) -> None:
    """All workers go on from the mean of their weights, and then from their turns' values."""
    together.outer.forget_sent()
    together.take_values()
    for step in range(STEPS + 1, STEPS + 2 * RULE.steps):
        optimizer.exchange()
        together.average()
        same([*net.parameters()], [*together.nets[optimizer.rank].parameters()])
        for _ in range(step % 2):  # also twice, when there is nothing new
            optimizer.exchange()
        optimizer.zero_grad()
        backward(net, step, optimizer.rank)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        together.step(step)


def count_once() -> None:
    """Where changes add up: gradients that do not depend on weights train as in one process."""
    kinds = (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.AdamW, {})
    for kind, more in kinds:
        trained = []
        for shares in (False, True):
            module = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.ones_(module.weight)
            one = kind(module.parameters(), lr=0.05, weight_decay=0.1, **more)
            one = p3kv.torch.Optimizer(module, one) if shares else one
            for step in range(2 * RULE.steps):
                one.zero_grad()
                module(torch.ones(1, 4) * (step % 3)).sum().backward()
                one.step()
            trained.append(module.weight)
        torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=0)


def same(mine: List[torch.Tensor], theirs: List[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0)


main()
