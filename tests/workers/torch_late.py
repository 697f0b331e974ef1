"""Reads weights in many ways while their new values are under way, and uses p3kv.torch wrongly.

Worker 1 computes late, so that worker 0's values are late, too.
"""

import p3kv.torch  # noqa: I001
import copy
import io
import pickle
import sys
import time
from typing import Any, Callable, Dict, Optional

import torch
from p3kv.consistency import make_consistency
from p3kv.frontends.torch.values import watched
from p3kv.frontends.torch.values.bucket import Bucket
from p3kv.frontends.torch.values.copies import HostCopies
from p3kv.wire.messages import DeclaredKey
from p3kv.worker import this_process
from p3kv.worker.transfers import WorkerKey
from torch import distributed, nn
from torch.nn import functional
from torch_refusals import refused

LATE_S = 0.4
DEADLINE_S = 60.0
ONES = torch.ones(1, 4)


def read_back(save: Callable[[Any, Any], None], load: Callable[[Any], Any], of: Any) -> Any:
    file = io.BytesIO()
    save(of, file)
    file.seek(0)
    return load(file)


def averaged(weight: nn.Parameter) -> torch.Tensor:
    average = torch.zeros(3, 4)
    average.lerp_(weight.detach(), 1.0)
    return average


def broadcast(weight: nn.Parameter) -> torch.Tensor:
    """By a collective of torch's, whose group is this process."""
    if not distributed.is_initialized():
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with torch.no_grad():
        distributed.broadcast(weight, 0)
    return weight


def gathered(weight: nn.Parameter) -> torch.Tensor:
    found = torch.zeros(3, 4)
    distributed.reduce_scatter(found, [weight])
    return found


READS: Dict[str, Callable[[nn.Linear], Any]] = {
    "a module": lambda m: m(torch.eye(4)).T,
    "functional": lambda m: functional.linear(torch.eye(4), m.weight).T,
    "by name": lambda m: torch.mul(torch.ones(3, 4), other=m.weight),
    "in a list": lambda m: torch.cat([m.weight, m.weight])[:3],
    "foreach": lambda m: torch._foreach_mul([m.weight], 1.0)[0],
    "data": lambda m: m.weight.data,
    "detach": lambda m: m.weight.detach(),
    "numpy": lambda m: m.weight.detach().numpy(),
    "tolist": lambda m: m.weight.tolist(),
    "state_dict": lambda m: m.state_dict()["weight"],
    "deepcopy": lambda m: copy.deepcopy(m).weight,
    "pickle": lambda m: read_back(pickle.dump, pickle.load, m).weight,
    "save": lambda m: read_back(torch.save, torch.load, m.state_dict())["weight"],
    "average": lambda m: averaged(m.weight),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).reshape(3, 4),
    "functional_call": lambda m: torch.func.functional_call(m, {}, (torch.eye(4),)).T,
    "repr": lambda m: m.weight if "nan" not in repr(m.weight) else None,
    "index": lambda m: torch.stack([row for row in m.weight]),
    "a collective": lambda m: broadcast(m.weight),
    "a list of a collective": lambda m: gathered(m.weight),
    "another thread": lambda m: torch.stack(list(map(torch.clone, m.weight.unbind()))),
}


def trained(
    model: nn.Module,
    rule: Optional[str] = None,
    inner: Optional[torch.optim.Optimizer] = None,
) -> p3kv.torch.Optimizer:
    inner = inner or torch.optim.SGD(model.parameters(), lr=1.0)
    updates = None if rule else "servers"
    return p3kv.torch.Optimizer(model, inner, consistency=rule, updates=updates)


def read_late() -> None:
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = trained(model)
    rank = this_process.worker().rank
    weight = model.weight
    for number, (name, read) in enumerate(READS.items(), 1):
        optimizer.zero_grad()
        if rank == 1:
            time.sleep(LATE_S)
        model(ONES).sum().backward()
        began = time.monotonic()
        optimizer.step()
        assert not weight.is_sparse and weight.shape == (3, 4) and weight.grad is not None
        assert time.monotonic() - began < LATE_S / 2, name
        assert isinstance(weight, nn.Parameter) and model.weight is weight
        found = torch.as_tensor(read(model))
        assert type(weight) is nn.Parameter, name
        # Each worker's gradient is 1 everywhere, and so is the mean.
        assert torch.equal(found.reshape(3, 4), torch.full((3, 4), -float(number))), (name, found)
    print("all reads wait")


class Extension(nn.Linear):
    """Reads its weight as code in C++ does, of which torch tells nobody."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return functional.linear(x, self.weight)


def scripted(*arguments: Any, **named: Any) -> Any:
    return torch.jit.script(nn.Linear(*arguments, **named))


def read_unseen() -> None:
    """By modules whose code torch does not tell of: they wait when they are called. Others cost
    nothing once the first steps are over, and who reads beside the module is refused."""
    rank = this_process.worker().rank
    for make, waits in [(nn.Linear, False), (Extension, True), (scripted, True)]:
        model = nn.Sequential(make(4, 3, bias=False), nn.Identity())
        nn.init.zeros_(model[0].weight)
        optimizer = trained(model)
        for number in range(7):
            if rank == 1:
                time.sleep(LATE_S / 4)
            found = model(torch.eye(4)).T
            assert torch.equal(found, torch.full((3, 4), -float(number))), (make, number, found)
            found.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (watched._entrance is not None) == waits, make
        trained(model)  # takes over
        assert watched._entrance is None
    model = nn.Linear(4, 3, bias=False)
    optimizer = trained(model)
    for waits in (True, True, False):
        if waits:
            optimizer.wait()
        loss = Extension.forward(model, ONES).sum()
        if waits:
            loss.backward()
            optimizer.step()
        else:
            refused("'weight' has a gradient, and p3kv has not seen who read it", loss.backward)


def write_early(width: int) -> None:
    """A large value is written as soon as it is there, though nobody reads its parameter."""
    model = nn.Linear(width, width, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = trained(model)
    weight = model.weight
    alias = weight.data
    for number in range(1, 4):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        deadline = time.monotonic() + DEADLINE_S
        while not torch.equal(alias, torch.full((width, width), -float(number))):
            assert time.monotonic() < deadline, "nobody has written it"
            time.sleep(0.001)


def write_two_at_once(width: int) -> None:
    """Two threads write a value, and the script has the next one come before both have done so."""
    model = nn.Linear(width, width, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = trained(model, "delayed:staleness=2")
    for number in range(1, 61):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(model.weight, torch.full((width, width), -float(number))), number


def write_slices() -> None:
    """Slices are written before the last one is there, into a parameter whose memory has the order
    of its elements; into any other, the whole value."""
    for strided in (False, True):
        parameter = nn.Parameter(torch.zeros(4, 6).T if strided else torch.zeros(6, 4))
        declared = DeclaredKey(0, "w", (6, 4), "float32", [(0, 24)])
        key = WorkerKey(declared, make_consistency("bulk_synchronous", 1))
        bucket = Bucket(key, [("w", parameter)], HostCopies())
        for number in (1.0, 2.0):
            bucket.begin()
            bucket.arm()
            bucket.staging.fill_(number)
            bucket.slice_arrived(10, 14)
            bucket.take_if_there()
            with torch._C.DisableTorchFunctionSubclass():  # or who looks would wait
                first, last = parameter.reshape(-1)[[0, 23]].tolist()
            assert (first, last) == (number - 1, number - 1 if strided else number)
            bucket.slice_arrived(0, 10)
            bucket.arrived(None)
            bucket.take()
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter, torch.full((6, 4), number))


def use_wrongly() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = trained(model)
    model(ONES).sum().backward()
    refused("'1.bias' has left, and a second backward", model(ONES).sum().backward)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    refused("was written to in place after backward had computed it", optimizer.step)
    refused(
        "opt.add_param_group() was called between backward and step()",
        optimizer.add_param_group,
        {"params": [ONES.clone()]},
    )
    other = nn.Linear(4, 3)
    changed = trained(other)
    other(ONES).sum().backward()
    changed.step()  # from now on, gradients leave during backward
    changed.zero_grad()
    other(ONES).sum().backward()
    refused("was not called in the first step", changed.clip_grad_norm_, 1.0)
    changed.param_groups[0]["lr"] = 0.5
    refused("param_groups were changed between backward", changed.step)
    zeroed = nn.Linear(4096, 2048)  # so large that it has not left when `step` returns
    early = trained(zeroed)
    zeroed(torch.ones(1, 4096)).sum().backward()
    early.step()
    gradient = zeroed.weight.grad
    torch.mul(gradient, 0, out=gradient)
    refused("was changed after opt.step(), while it was still being sent", early.wait)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    refused("GradScaler was not called in the first step", scaler.step, changed)
    plain = trained(nn.Linear(4, 3))
    torch.amp.GradScaler("cpu", enabled=False).step(plain)
    complexes = nn.Linear(2, 2).to(torch.complex64)
    refused("'weight' is torch.complex64", trained, complexes)
    refused("can't train on the device 'meta'", trained, nn.Linear(2, 2, device="meta"))
    renewed = nn.Linear(4, 3)
    stale = trained(renewed)
    renewed.weight = nn.Parameter(torch.zeros(3, 4))
    renewed(ONES).sum().backward()
    stale.step()  # warns
    small = nn.Linear(2, 2)
    shrinks = torch.optim.LBFGS(small.parameters())
    refused("LBFGS: it evaluates the closure", trained, small, None, shrinks)
    refused(
        "and workers can't do it either: ", p3kv.torch.Optimizer, small, shrinks, None,
        "asynchronous",
    )  # fmt: skip
    print("wrong uses are named")


if sys.argv[1:] == ["wrong"]:
    use_wrongly()
else:
    read_late()
    read_unseen()
    write_early(256)
    write_early(1024)  # slice by slice
    write_two_at_once(1024)
    write_slices()
    print("values are written early")
