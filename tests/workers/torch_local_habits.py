"""Scripts of torch's users whose workers train by themselves: P3KV_CONSISTENCY=local:steps=4.

Argument: a folder in which workers tell each other where they are. P3KV_WARN_AFTER_S is less than
`LAG_S`.
"""

import p3kv.torch  # noqa: I001
import sys
import time
from pathlib import Path
from typing import Any, List

import torch
from p3kv.errors import NotSupportedError
from p3kv.report.verdict import PARTS
from p3kv.worker import this_process

FOLDER = Path(sys.argv[1])
LAG_S = 3.0


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers).to(dtype)


def loss_of(net: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(net.parameters()).dtype
    loss: torch.Tensor = (net(torch.randn(4, 6, generator=random).to(dtype)) ** 2).sum()
    return loss


def values(net: torch.nn.Module) -> List[torch.Tensor]:
    return [one.detach().clone() for one in net.parameters()]


def same(mine: List[torch.Tensor], theirs: List[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def scaled_losses() -> None:
    """A step that GradScaler skips on one worker counts there, too, or this would not end."""
    net, twin = network(), network()
    optimizer = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.01))
    alone = torch.optim.SGD(twin.parameters(), lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(9):
        for one, its, scaler in zip((net, twin), (optimizer, alone), scalers):
            its.zero_grad()
            loss = loss_of(one, step, optimizer.rank)
            if step == 1 and optimizer.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(its)
                torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            scaler.step(its)
            scaler.update()
        if step < 1:  # until another worker's steps are in the weights
            same(values(net), values(twin))
    assert scalers[0].get_scale() == scalers[1].get_scale() == (512 if optimizer.rank else 1024)
    assert not hasattr(optimizer, "found_inf")


def evaluations() -> None:
    """All workers can have the servers' values, and go on from them or from their own weights."""
    net = network()
    optimizer = p3kv.torch.Optimizer(net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2))
    for step in range(6):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, step, optimizer.rank)
            loss.backward()
            return loss

        optimizer.step(closure)
    own = {name: one.clone() for name, one in net.state_dict().items()}
    optimizer.synchronize()
    print("the servers' own:", [one.sum().item() for one in values(net)])
    net.load_state_dict(own)
    optimizer.step(closure)
    for one, other in zip(values(net), own.values()):
        assert not torch.equal(one, other)


def halves() -> None:
    net = network(torch.bfloat16)
    optimizer = p3kv.torch.Optimizer(net, torch.optim.Adam(net.parameters(), lr=0.01))
    before = values(net)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(net, step, optimizer.rank).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    optimizer.synchronize()
    for one, other in zip(values(net), before):
        assert one.isfinite().all() and not torch.equal(one, other)


def frozen_in_step() -> None:
    """A model that is frozen but in its own backward pass, as StyleGAN2-ADA's."""
    net = network()
    optimizer = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for step in range(6):
        optimizer.zero_grad()
        net.requires_grad_(True)
        loss_of(net, step, optimizer.rank).backward()
        net.requires_grad_(False)
        optimizer.step()
    optimizer.synchronize()
    total = float(sum(one.double().sum() for one in net.parameters()))
    workers = this_process.worker().num_workers
    assert abs(optimizer.sum(total) - workers * total) < 1e-9, total


def sparse_gradients() -> None:
    """They stay on this worker; the weight travels dense."""
    table = torch.nn.Embedding(20, 3, sparse=True)
    optimizer = p3kv.torch.Optimizer(table, torch.optim.SparseAdam(table.parameters(), lr=0.1))
    for step in range(8):
        optimizer.zero_grad()
        table(torch.tensor([2 * step + optimizer.rank])).sum().backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        optimizer.step()
    optimizer.synchronize()
    print("the servers' own:", table.weight.sum().item())


def lags() -> None:
    """A worker that lags behind is named by one that waits for it, and not by one that goes on."""
    net = torch.nn.Linear(6, 1, bias=False)
    optimizer = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.01))

    def steps(count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            loss_of(net, step, optimizer.rank).backward()
            optimizer.step()

    if optimizer.rank == 0:
        steps(4)  # the value of the first step is taken after the fifth
        time.sleep(LAG_S)
        print("worker 0 has not waited", file=sys.stderr)
        (FOLDER / "waits").touch()
    else:
        while not (FOLDER / "waits").exists():
            time.sleep(0.01)
        time.sleep(LAG_S)
        steps(4)
    steps(4)
    optimizer.wait()
    if optimizer.rank == 0:
        worker, deadline = this_process.worker(), time.monotonic() + LAG_S
        while (seen := worker.stats())["steps"] < 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        parts = [seen[f"{part}_s"] for part in PARTS]
        assert seen["steps"] == 7 and abs(sum(parts) - seen["step_s"]) < 1e-6, seen
        assert LAG_S / 2 < seen["straggler_s"] < seen["step_s"] - LAG_S / 2, seen
        assert seen["verdict"]["limit"] == "straggler", seen


def refused() -> None:
    class WithBuffer(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("mean", torch.zeros(2))

    made: Any = WithBuffer()
    try:
        p3kv.torch.Optimizer(made, torch.optim.SGD(made.parameters()), buffers="average")
    except NotSupportedError as error:
        assert "which the consistency is to avoid" in str(error), error
    else:
        raise AssertionError("averages")


lags()
scaled_losses()
evaluations()
halves()
frozen_in_step()
sparse_gradients()
refused()
print("all habits are right")
