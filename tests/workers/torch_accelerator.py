"""Trains on an accelerator with p3kv.torch, and the same with p3kv.torch on the CPU, and compares.

Arguments: the type of the device, or 'any' for the one that torch finds; then the names of the
cases.
"""

import p3kv.torch  # noqa: I001
import contextlib
import copy
import os
import sys
from typing import Any, Callable, Dict, List

import torch

KIND, *CASES = sys.argv[1:]
STEPS, BATCH = 12, 8


class Net(torch.nn.Module):
    """With other strides, statistics, a layer that only some steps use, a weight that is large
    enough to be written early, one that nobody trains, and a last layer on the CPU."""

    def __init__(self, device: torch.device, last: torch.device) -> None:
        super().__init__()
        self.images = torch.nn.Conv2d(3, 16, 3, bias=False).to(
            device, memory_format=torch.channels_last
        )
        self.norm = torch.nn.BatchNorm2d(16).to(device)
        self.wide = torch.nn.Linear(16 * 16, 200).to(device)
        self.seldom = torch.nn.Linear(200, 200).to(device)
        self.frozen = torch.nn.Parameter(torch.randn(200).to(device), requires_grad=False)
        self.last = torch.nn.Linear(200, 4).to(last)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = torch.tanh(self.norm(self.images(x))).reshape(len(x), -1)
        x = torch.tanh(self.wide(x)) + self.frozen
        return self.last((x + self.seldom(x) if uses_all else x).to(self.last.weight.device))


class Beside(Net):
    """Of which a layer is computed on a stream of its own, as its gradient is."""

    def __init__(self, device: torch.device, last: torch.device) -> None:
        super().__init__(device, last)
        self.beside = torch.nn.Linear(200, 200).to(device)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = torch.tanh(self.norm(self.images(x))).reshape(len(x), -1)
        x = torch.tanh(self.wide(x)) + self.frozen
        x = x + on_another_stream(self.beside, x)
        return self.last((x + self.seldom(x) if uses_all else x).to(self.last.weight.device))


class Compiled(Net):
    def __init__(self, device: torch.device, last: torch.device) -> None:
        super().__init__(device, device)
        self.compile(dynamic=False)


class Rows(torch.nn.Module):
    """With a table of which few rows travel."""

    def __init__(self, device: torch.device, last: torch.device) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5000, 8, sparse=True).to(device)
        self.bag = torch.nn.EmbeddingBag(40, 8, sparse=True).to(device)
        self.last = torch.nn.Linear(8, 4).to(device)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = (x.flatten(1)[:, :6] * 1e6).long()
        rows, more = x.remainder(5000), x.remainder(40)
        return self.last(torch.tanh(self.table(rows).mean(1) + self.bag(more)))


def adamw(net: torch.nn.Module) -> List[torch.optim.Optimizer]:
    return [torch.optim.AdamW(net.parameters(), lr=0.01, eps=0.01)]  # noise stays small


def momentum(net: torch.nn.Module) -> List[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)]


def by_rows(net: torch.nn.Module) -> List[torch.optim.Optimizer]:
    tables = [net.table.weight, net.bag.weight]
    return [
        torch.optim.SparseAdam(tables, lr=0.01),
        torch.optim.Adam(net.last.parameters(), lr=0.01),
    ]


def on_another_stream(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the layer makes of `x`, after much other work there."""
    if x.device.type == "cpu":
        return layer(x)
    module = torch.get_device_module(x.device)
    beside = module.Stream(x.device)
    beside.wait_stream(module.current_stream(x.device))
    with module.stream(beside):
        y = Late.apply(layer(x))
    module.current_stream(x.device).wait_stream(beside)
    return y


class Late(torch.autograd.Function):
    """Of a result and of its gradient, that they are there long after they are asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * take_long(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * take_long(gradient)


def take_long(x: torch.Tensor) -> torch.Tensor:
    """1, computed for some milliseconds."""
    square = torch.zeros(2000, 2000, device=x.device)
    for _ in range(30):
        square = square.mm(square)
    return 1 + square[0, 0]


class Case:
    def __init__(
        self,
        optimizers: Callable[[torch.nn.Module], List[torch.optim.Optimizer]],
        net: type = Net,
        dtype: torch.dtype = torch.float32,
        clips: bool = False,
        scales: bool = False,
        tolerance: float = 1e-4,
        has_states: bool = True,
        **options: Any,
    ) -> None:
        self.optimizers = optimizers
        self.net = net
        self.dtype = dtype
        self.clips = clips
        self.scales = scales
        self.tolerance = tolerance
        self.has_states = has_states
        self.options = options


CASES_BY_NAME = {
    "dense": Case(adamw),
    "clipped": Case(momentum, clips=True, buffers="average"),
    "scaled": Case(adamw, clips=True, scales=True),
    "half": Case(adamw, dtype=torch.bfloat16, tolerance=3e-2, buffers="own"),
    "rows": Case(by_rows, net=Rows),
    "streams": Case(adamw, net=Beside),
    "averages": Case(momentum, net=Beside, clips=True, updates="workers"),
    "compiled": Case(adamw, net=Compiled),
    "rule": Case(adamw, has_states=False, buffers="own"),
}


def images(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 3, 6, 6, generator=random)


def backward(
    net: torch.nn.Module,
    step: int,
    rank: int,
    share: float = 1.0,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
) -> None:
    weight = next(net.parameters())
    x = images(step, rank)
    if isinstance(net, Net):
        x = x.to(weight.dtype)
    y = net(x.to(weight.device), step % 4 == 1 or (step % 4 == 2 and rank == 0))
    scale(y.float().square().mean() * share).backward()


def zero_gradients(
    net: torch.nn.Module,
    optimizers: List[torch.optim.Optimizer],
    device: torch.device,
    in_place: bool,
) -> None:
    """On an accelerator also in memory that is being copied to the host's."""
    if in_place and device.type == "cpu":
        for one in optimizers:
            one.wait()
    for weight in net.parameters():
        if in_place and weight.device == device and weight.grad is not None:
            weight.grad.zero_()
        else:
            weight.grad = None


def read_at_last(weight: torch.Tensor) -> torch.Tensor:
    """A copy that an accelerator makes long after it was asked for."""
    weight = weight.detach()
    for _ in range(50):
        weight.t().mm(weight)
    return weight.clone()


def averaged(ema: List[torch.Tensor], net: torch.nn.Module, device: torch.device) -> None:
    """Reads all weights on another stream, as averages of weights do, before anyone else."""
    weights = [*net.parameters()]
    if device.type == "cpu":
        torch._foreach_lerp_(ema, weights, 0.1)
        return
    module = torch.get_device_module(device)
    beside = module.Stream(device)
    beside.wait_stream(module.current_stream(device))
    with module.stream(beside):
        for one, weight in zip(ema, weights):
            one.lerp_(weight.detach().to(one.device), 0.1)
    module.current_stream(device).wait_stream(beside)


def trained(case: Case, device: torch.device) -> Dict[str, torch.Tensor]:
    """All that a training leaves, on the CPU."""
    torch.manual_seed(7)
    net = case.net(device, torch.device("cpu")).to(case.dtype)
    optimizers = [p3kv.torch.Optimizer(net, one, **case.options) for one in case.optimizers(net)]
    first = optimizers[0]
    found: Dict[str, torch.Tensor] = {}
    scaler = torch.amp.GradScaler(
        device.type, init_scale=2.0**10, growth_interval=3, enabled=case.scales
    )
    ema = [weight.detach().clone().float() for weight in net.parameters()]
    for step in range(STEPS):
        if step % 3 == 0:
            with contextlib.ExitStack() as stack:
                for one in optimizers:
                    stack.enter_context(one.no_sync())
                backward(net, step, first.rank, 0.5, scaler.scale)
        overflows = case.scales and step == 6 and first.rank == 1
        backward(net, step, first.rank, 1e38 if overflows else 1.0, scaler.scale)
        for one in optimizers:
            scaler.unscale_(one)
        if case.clips:
            found[f"norm {step}"] = first.clip_grad_norm_(0.1)
        if isinstance(net, Net):
            found[f"read before step {step}"] = read_at_last(net.wide.weight)
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        found[f"scale {step}"] = torch.tensor(scaler.get_scale())
        zero_gradients(net, optimizers, device, in_place=step % 2 == 0)
        if step % 4 == 3 and case.dtype is torch.float32:
            averaged(ema, net, device)
        if step == 5 and case.has_states:
            for one in optimizers:
                one.load_state_dict(copy.deepcopy(one.state_dict()))
        if step == 8:
            backward(copy.deepcopy(net), step, first.rank)
    first.synchronize()
    found.update((f"ema {at}", one) for at, one in enumerate(ema))
    found.update((f"weight {name}", one.detach()) for name, one in net.named_parameters())
    found.update((f"buffer {name}", one.clone()) for name, one in net.named_buffers())
    if case.has_states:
        for one in optimizers:
            for at, state in one.state_dict()["state"].items():
                for name, value in state.items():
                    found[f"state {one is first} {at} {name}"] = torch.as_tensor(value)
    return {name: one.cpu().float() for name, one in found.items()}


def compare(case: Case, mine: Dict[str, torch.Tensor], theirs: Dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    limit = case.tolerance
    wrong = [
        f"{name} by {float((one - theirs[name]).abs().max()):.1e}"
        for name, one in mine.items()
        if not torch.allclose(one, theirs[name], rtol=limit, atol=limit, equal_nan=True)
    ]
    assert not wrong, f"other numbers than on the CPU: {wrong}"


def chosen_device() -> torch.device:
    if KIND == "cpu":
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator().type if KIND == "any" else KIND
    torch.backends.cudnn.allow_tf32 = False
    every = torch.get_device_module(kind).device_count()
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % every)


def written(device: torch.device) -> None:
    """A write that torch does not count, which another thread finds than that of the script."""
    torch.manual_seed(7)
    net = Net(device, device)
    optimizer = p3kv.torch.Optimizer(net, adamw(net)[0])
    for step in range(STEPS):
        backward(net, step, optimizer.rank)
        optimizer.step()
        net.wide.weight.data.mul_(1.5)


def main() -> None:
    device = chosen_device()
    for name in CASES:
        if name == "written":
            written(device)
            continue
        case = CASES_BY_NAME[name]
        compare(case, trained(case, device), trained(case, torch.device("cpu")))
        print(f"{name} is right on {device}")


main()
