"""Trains with p3kv.torch by means of gradients (`updates="workers"`), and compares, bit for bit,
with a process that has all workers' gradients. Arguments: names of functions to run."""

import p3kv.torch  # noqa: I001
import copy
import math
import os
import sys
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from p3kv.errors import NotSupportedError
from torch.utils.checkpoint import checkpoint
from torch_refusals import refused

Loss = Callable[[torch.nn.Module, int], torch.Tensor]
"""Of a model, and of a worker's rank."""


class Sign(torch.optim.Optimizer):
    """An optimizer of the script's own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    sums = self.state[one].setdefault("sum", torch.zeros_like(one))
                    sums.mul_(0.9).add_(one.grad)
                    one.sub_(torch.sign(sums), alpha=group["lr"])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 300)  # of which the weight travels in slices
        self.second = torch.nn.Linear(300, 4)
        self.seldom = torch.nn.Linear(4, 4)
        self.never = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, uses_seldom: bool = True) -> torch.Tensor:
        x = self.frozen(self.second(torch.tanh(self.first(x))))
        return self.seldom(x) if uses_seldom else x


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_at(step: int, uses_seldom: Callable[[int], bool] = lambda rank: True) -> Loss:
    return lambda net, rank: (net(data(step, rank), uses_seldom(rank)) ** 2).mean()


class Alone:
    """All workers' gradients in one process, as DistributedDataParallel has them."""

    def __init__(self, net: torch.nn.Module, workers: int) -> None:
        self.net, self.workers = net, workers
        self.parameters = [one for one in net.parameters() if one.requires_grad]
        self.none()

    def none(self) -> None:
        """As zero_grad."""
        self.grads: List[List[Optional[torch.Tensor]]] = [
            [None] * len(self.parameters) for _ in range(self.workers)
        ]

    def backward(self, loss: Loss, synced: bool = True) -> None:
        for rank, grads in enumerate(self.grads):
            found = torch.autograd.grad(loss(self.net, rank), self.parameters, allow_unused=True)
            for at, one in enumerate(found):
                before = grads[at]
                grads[at] = one if before is None else before if one is None else before + one
        if synced:
            for at, parameter in enumerate(self.parameters):
                theirs = [grads[at] for grads in self.grads]
                if any(one is not None for one in theirs):
                    total = torch.zeros_like(parameter)
                    for one in theirs:
                        total += 0 if one is None else one
                    for grads in self.grads:
                        grads[at] = total / self.workers
        for parameter, one in zip(self.parameters, self.grads[0]):
            parameter.grad = one


class Pair:
    """A model that all workers train, and its twin in this process alone."""

    def __init__(
        self,
        made: Callable[[Any], torch.optim.Optimizer],
        net: Callable[[], Any] = Net,
        updates: Optional[str] = "workers",
    ) -> None:
        torch.manual_seed(3)
        self.twin = net()
        torch.manual_seed(3 if os.environ.get("DMLC_WORKER_ID", "0") == "0" else 99)
        self.net = net()
        self.optimizer = p3kv.torch.Optimizer(
            self.net, made(self.net.parameters()), updates=updates
        )
        assert self.optimizer.updates == (updates or "servers")
        self.alone = Alone(self.twin, self.optimizer.num_workers)
        self.its = made(self.twin.parameters())

    def none(self) -> None:
        self.optimizer.zero_grad()
        self.alone.none()

    def backward(self, loss: Loss, synced: bool = True) -> None:
        if synced:
            loss(self.net, self.optimizer.rank).backward()
        else:
            with self.optimizer.no_sync():
                loss(self.net, self.optimizer.rank).backward()
        self.alone.backward(loss, synced)
        if synced:
            self.same_gradients()

    def both(self, change: Callable[[torch.nn.Module], None]) -> None:
        for net in (self.net, self.twin):
            change(net)

    def step(self) -> None:
        self.optimizer.step()
        self.its.step()
        for (name, one), other in zip(self.net.named_parameters(), self.twin.parameters()):
            assert torch.equal(one, other), (name, (one - other).abs().max())

    def same_gradients(self) -> None:
        for (name, one), other in zip(self.net.named_parameters(), self.twin.parameters()):
            if one.grad is None or other.grad is None:
                assert one.grad is other.grad, (name, one.grad, other.grad)
            else:
                assert torch.equal(one.grad, other.grad), name


OPTIMIZERS: Dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda every: torch.optim.SGD(every, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda every: torch.optim.AdamW(every, lr=0.01),
    "fused": lambda every: torch.optim.Adam(every, lr=0.01, fused=True),
    "Sign": lambda every: Sign(every, lr=0.01),
}


def optimizers() -> None:
    for made in OPTIMIZERS.values():
        pair = Pair(made)
        for step in range(6):
            pair.none()
            pair.backward(loss_at(step, lambda rank, step=step: step % 3 == 0 or step % 3 > rank))
            pair.step()


def chosen() -> None:
    """Where servers can't, workers do."""
    net = Net()
    strange = torch.optim.SGD(net.parameters(), lr=0.1)
    strange.defaults["note"] = strange.param_groups[0]["note"] = object()
    complexes = Complex()
    for one, optimizer in (
        (net, Sign(net.parameters(), lr=0.1)),
        (net, torch.optim.LBFGS(net.parameters())),
        (complexes, torch.optim.Adam(complexes.parameters())),
        (net, strange),
    ):
        made = p3kv.torch.Optimizer(one, optimizer)
        assert made.updates == made.stats()["updates"] == "workers"
        assert made.stats()["why"]
    for more in ({}, {"fused": True}):
        adam = torch.optim.Adam(net.parameters(), **more)
        made = p3kv.torch.Optimizer(net, adam)
        assert made.updates == "servers" and made.stats()["why"] is None


def first_step() -> None:
    """What the script does with gradients in its first step tells who updates."""

    def of_rank_0(pair: Pair) -> None:
        if pair.optimizer.rank == 0:
            pair.optimizer.norm = sum(one.grad.norm() for one in pair.net.first.parameters())

    def halved(pair: Pair) -> None:
        pair.both(lambda net: [one.grad.mul_(0.5) for one in net.first.parameters()])

    def passes(pair: Pair) -> None:
        pair.backward(loss_at(50))

    def sampled(pair: Pair) -> None:
        def clip(net: torch.nn.Module) -> None:
            array = net.first.weight.grad.numpy()
            array.clip(-0.01, 0.01, array)

        pair.both(clip)

    for uses in (
        of_rank_0,
        halved,
        passes,
        sampled,
        lambda pair: pair.both(
            lambda net: torch.nn.utils.clip_grad_norm_(net.first.parameters(), 0.1)
        ),
        lambda pair: pair.both(lambda net: torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)),
        lambda pair: pair.both(
            lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type=1)
        ),
        lambda pair: (
            pair.optimizer.clip_grad_norm_(0.01, math.inf),
            torch.nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.01, math.inf),
        ),
        lambda pair: pair.both(lambda net: setattr(net.second.weight, "grad", None)),
    ):
        pair = Pair(OPTIMIZERS["AdamW"], updates=None)
        for step in range(4):
            pair.none()
            loss = loss_at(step, lambda rank, step=step: step % 3 > rank)
            loss(pair.net, pair.optimizer.rank).backward()
            # The second pass tells that the first one's gradients are to be means, too.
            pair.alone.backward(loss, synced=step > 0 or uses is not passes)
            uses(pair)
            pair.step()
            assert pair.optimizer.updates == "workers", uses
        pair.optimizer.wait()
    for uses in (
        lambda pair: None,
        lambda pair: pair.optimizer.clip_grad_norm_(0.1),
        lambda pair: torch.nn.utils.clip_grad_norm_(pair.net.parameters(), 0.1),
        lambda pair: pair.optimizer.skip_step(False),
        lambda pair: [one.grad.shape for one in pair.net.first.parameters()],
    ):
        pair = Pair(OPTIMIZERS["SGD"], updates=None)
        for step in range(3):
            pair.none()
            loss_at(step)(pair.net, pair.optimizer.rank).backward()
            uses(pair)
            pair.optimizer.step()
            assert pair.optimizer.updates == "servers"


def encoded() -> None:
    """By codecs, workers have the same weights still, near those of one process."""
    pair = Pair(OPTIMIZERS["SGD"])
    for step in range(8):
        pair.none()
        loss_at(step)(pair.net, pair.optimizer.rank).backward()
        pair.alone.backward(loss_at(step))
        pair.optimizer.step()
        pair.its.step()
    rough = "topk" in os.environ["P3KV_GRADIENT_CODEC"]
    for one, other in zip(pair.net.parameters(), pair.twin.parameters()):
        if not rough:
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
        elif one.requires_grad and one.grad is not None:
            assert not torch.equal(one, other) or one.numel() < 100
        numbers = one.detach().double().reshape(-1)
        for number in (numbers.sum().item(), numbers.abs().max().item()):
            workers = pair.optimizer.num_workers
            assert pair.optimizer.sum(number) == workers * number


def compiled() -> None:
    """Gradients of a compiled model come when all of its backward pass has ended."""
    pair = Pair(OPTIMIZERS["SGD"])
    module = torch.compile(pair.net, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def train(x: torch.Tensor) -> None:
        (pair.net(x) ** 2).mean().backward()

    for step in range(6):
        pair.none()
        if step < 3:
            loss_at(step)(module, pair.optimizer.rank).backward()
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Dynamo does not know how to trace")
                train(data(step, pair.optimizer.rank))
        pair.alone.backward(loss_at(step))
        pair.optimizer.step()
        pair.its.step()
        for one, other in zip(pair.net.parameters(), pair.twin.parameters()):
            torch.testing.assert_close(one, other)


def lbfgs() -> None:
    pair = Pair(lambda every: torch.optim.LBFGS(every, lr=0.1, max_iter=3, tolerance_change=0.0))
    for step in range(3):
        loss = loss_at(step)

        def closure(loss: Loss = loss) -> torch.Tensor:
            pair.optimizer.zero_grad()
            found = loss(pair.net, pair.optimizer.rank)
            found.backward()
            return found

        def alone(loss: Loss = loss) -> torch.Tensor:
            pair.alone.none()
            pair.alone.backward(loss)
            return loss(pair.twin, pair.optimizer.rank)

        pair.optimizer.step(closure)
        pair.its.step(alone)
        for one, other in zip(pair.net.parameters(), pair.twin.parameters()):
            assert torch.equal(one, other)


def groups() -> None:
    """Parameters are added in mid-training."""
    pair = Pair(lambda every: torch.optim.SGD([*every][:2], lr=0.1, momentum=0.9))
    for step in range(6):
        if step in (2, 4):
            for optimizer, net in ((pair.optimizer, pair.net), (pair.its, pair.twin)):
                more = net.second if step == 2 else net.seldom
                optimizer.add_param_group({"params": [*more.parameters()], "lr": 0.05})
        pair.both(lambda net: net.zero_grad())
        pair.alone.none()
        loss = loss_at(step)
        loss(pair.net, pair.optimizer.rank).backward()
        pair.alone.backward(loss)
        pair.step()
    pair.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))
    try:
        pair.optimizer.step()
    except NotSupportedError as error:
        assert "can't come into the optimizer's param_groups" in str(error), error
    else:
        raise AssertionError("a parameter that came unseen")


def weighed_and_grown() -> None:
    """Parameters are added after this worker's gradients have been weighed, and before they are
    computed."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 3))
    inner = torch.optim.SGD(net[0].parameters(), lr=0.1)
    optimizer = p3kv.torch.Optimizer(net, inner, updates="workers")
    twin = copy.deepcopy(net)
    weights = [3.0, 1.0]
    optimizer.weigh(weights[optimizer.rank])
    optimizer.add_param_group({"params": [*net[1].parameters()]})
    twin[1].load_state_dict(net[1].state_dict())
    net(data(0, optimizer.rank)).square().mean().backward()
    for rank, weight in enumerate(weights):
        (twin(data(0, rank)).square().mean() * weight / sum(weights)).backward()
    for one, other in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(one.grad, other.grad)
    optimizer.step()
    assert abs(sum(optimizer.shares()) - 1) < 1e-9


def passes() -> None:
    """Several passes for a step, synced or not, and gradients that the script changes."""
    pair = Pair(OPTIMIZERS["SGD"])
    for step in range(6):
        pair.none()
        pair.backward(loss_at(10 * step), synced=step % 2 == 0)
        pair.backward(loss_at(10 * step + 1, lambda rank: rank == 0))
        pair.backward(loss_at(10 * step + 2))
        if step == 2:
            pair.both(lambda net: torch.nn.utils.clip_grad_value_(net.parameters(), 0.01))
        if step == 3:
            pair.both(lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        if step == 4:
            pair.both(lambda net: setattr(net.second.weight, "grad", None))
        if step == 5:
            pair.both(lambda net: [one.grad.data.mul_(0.5) for one in net.seldom.parameters()])
        pair.step()
    assert pair.optimizer.sum(pair.optimizer.rank + 1) == 3
    pair.none()
    pair.backward(loss_at(100))
    norm = pair.optimizer.clip_grad_norm_(0.1)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1))
    pair.step()


def scaler() -> None:
    """Overflows of one worker are all workers'."""
    pair = Pair(OPTIMIZERS["AdamW"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(5):
        pair.none()

        def loss(net: torch.nn.Module, rank: int, step: int = step) -> torch.Tensor:
            found = scalers[0].scale(loss_at(step)(net, rank))
            return found * float("inf") if step == 2 and rank == 1 else found

        loss(pair.net, pair.optimizer.rank).backward()
        scalers[1].scale(torch.zeros(()))
        pair.alone.backward(loss)
        for one, optimizer, net in zip(scalers, (pair.optimizer, pair.its), (pair.net, pair.twin)):
            if step % 2:
                one.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            one.step(optimizer)
        for one in scalers:
            one.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (1024 if step < 2 else 512)
        for one, other in zip(pair.net.parameters(), pair.twin.parameters()):
            assert torch.equal(one, other)


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.bias = torch.nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, _: bool = True) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


class Checkpointed(torch.nn.Module):
    """One weight in two segments of reentrant checkpoints: its gradient comes in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.inner = torch.nn.Linear(6, 4), torch.nn.Linear(4, 4)
        self.reentrant = True

    def forward(self, x: torch.Tensor, _: bool = True) -> torch.Tensor:
        x = torch.tanh(self.begin(x))
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=self.reentrant)
        return x


def models() -> None:
    """Complex parameters, and gradients that come in parts."""
    for net in (Complex, Checkpointed):
        pair = Pair(OPTIMIZERS["SGD"], net)
        pair.twin.reentrant = False
        for step in range(4):
            pair.none()
            pair.backward(loss_at(step))
            pair.step()


def large_halves() -> None:
    """The sum of gradients is too large for float16, and their mean is not."""
    net = torch.nn.Linear(2, 2).to(torch.float16)
    optimizer = p3kv.torch.Optimizer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), updates="workers"
    )
    (net.weight.sum() * 60000.0).backward()
    assert torch.equal(net.weight.grad, torch.full((2, 2), 60000.0, dtype=torch.float16))
    assert net.bias.grad is None
    optimizer.zero_grad()


class Tables(torch.nn.Module):
    """A table of rows, one of which always has a gradient of zeros; one that rank 0 uses alone in
    some steps, and nobody in others; and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(30, 5, sparse=True)
        self.bags = torch.nn.EmbeddingBag(12, 5, mode="sum", sparse=True)
        self.out = torch.nn.Linear(5, 2)

    def forward(self, ids: torch.Tensor, uses_bags: bool) -> torch.Tensor:
        x = (self.words(ids) * (ids != 3)[..., None]).sum(1)
        return self.out(x + self.bags(ids % 12) if uses_bags else x)


def sparse() -> None:
    """Means of sparse gradients have the rows that any worker's have, also those of zeros."""

    def rows_of(net: Tables) -> List[torch.nn.Parameter]:
        return [net.words.weight, net.bags.weight]

    def loss(net: Tables, step: int, rank: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(30 if step % 2 else 8, (4, 3), generator=random)
        ids[0, 0] = 3
        uses = step % 3 == 0 or (step % 3 == 1 and rank == 0)
        return (net(ids, uses) ** 2).mean() * (0 if step == 4 else 1)

    def of_all(twin: Tables, step: int, weights: Sequence[float]) -> None:
        for rank, weight in enumerate(weights):
            (loss(twin, step, rank) * weight / sum(weights)).backward()

    def changed(net: Tables) -> None:
        for one in rows_of(net):
            one.grad = None if one.grad is None else one.grad.coalesce() * 0.5

    makes = {
        "SparseAdam": lambda net: torch.optim.SparseAdam(rows_of(net), lr=0.05),
        "SGD": lambda net: torch.optim.SGD(rows_of(net), lr=0.1, momentum=0.9),
        "used": lambda net: torch.optim.SGD(rows_of(net), lr=0.1),
    }
    for name, made in makes.items():
        torch.manual_seed(3)
        net, twin = Tables(), Tables()
        twin.load_state_dict(net.state_dict())
        mine = [
            p3kv.torch.Optimizer(
                net, made(net), updates="workers" if name == "SparseAdam" else None
            ),
            p3kv.torch.Optimizer(
                net, torch.optim.SGD(net.out.parameters(), 0.1), updates="workers"
            ),
        ]
        its = [made(twin), torch.optim.SGD(twin.out.parameters(), 0.1)]
        for step in range(9):
            for one in (*mine, *its):
                one.zero_grad()
            weights = [2.0, 1.0] if step in (5, 6) else [1.0, 1.0]
            if step in (5, 6):
                mine[0].weigh(weights[mine[0].rank])
                mine[1].weigh(weights[mine[0].rank])
            loss(net, step, mine[0].rank).backward()
            of_all(twin, step, weights)
            if name == "used":
                changed(net)
                changed(twin)
            for one, other in zip(rows_of(net), rows_of(twin)):
                if other.grad is None:
                    assert one.grad is None, (name, step)
                    continue
                assert one.grad.is_sparse and one.grad.is_coalesced(), (name, step)
                assert torch.equal(one.grad.indices(), other.grad.coalesce().indices()), (
                    name,
                    step,
                )
                torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())
            for one in (*mine, *its):
                one.step()
            for one, other in zip(net.parameters(), twin.parameters()):
                torch.testing.assert_close(one, other)
            assert mine[0].updates == "workers", name


def uneven() -> None:
    """Epochs of different lengths, beside DistributedDataParallel itself, of whose optimizers'
    states those of a worker without batches stay behind. Gradients are changed before a step, and
    make several passes for one; a worker has no batch of some epochs."""
    torch.distributed.init_process_group("gloo")
    makes = (
        lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    )
    for made, updates in ((one, how) for one in makes for how in ("workers", None)):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        twin = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(net))
        mine, its = p3kv.torch.Optimizer(net, made(net), updates=updates), made(twin)
        rank = mine.rank
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (mine, its)]
        for epoch, batches in enumerate([(0, 2, 1), (3, 1, 2), (0, 2, 0), (2, 3, 3)]):
            counts = epoch % 2 == 0
            for module, optimizer, schedule, joins in zip(
                (net, twin), (mine, its), schedules, (mine.join, twin.join)
            ):
                with joins(divide_by_initial_world_size=counts):
                    for step in range(batches[rank]):
                        optimizer.zero_grad()
                        for part in range(1 + step % 2):
                            x = data(100 * epoch + 10 * step + part, rank)
                            module(x).square().mean().backward()
                        torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
                        optimizer.step()
                        schedule.step()
            for one, other in zip(net.parameters(), twin.parameters()):
                torch.testing.assert_close(one, other)
                torch.testing.assert_close(one.grad, other.grad)
            assert mine.updates == "workers"
    with mine.join():
        refused("opt.skip_step() inside of opt.join()", skip_in_join, mine, net)
        refused("was called inside of opt.join()", mine.add_param_group, {"params": []})
    torch.distributed.destroy_process_group()


def skip_in_join(optimizer: p3kv.torch.Optimizer, net: torch.nn.Module) -> None:
    net(data(0, 0)).sum().backward()
    optimizer.skip_step(False)


def caught() -> None:
    """A backward pass that raises on one worker, which then computes it anew."""
    pair = Pair(OPTIMIZERS["SGD"])
    for step in range(3):
        pair.none()
        if step == 1 and pair.optimizer.rank == 1:

            def refuse(gradient: torch.Tensor) -> None:
                raise MemoryError

            hook = pair.net.first.weight.register_hook(refuse)
            try:
                loss_at(50)(pair.net, 1).backward()
            except MemoryError:
                pair.optimizer.zero_grad()
            else:
                raise AssertionError("nothing was raised")
            hook.remove()
        pair.backward(loss_at(step))
        pair.step()


def two_optimizers() -> None:
    """A GAN's: the generator's loss reaches the critic's weights."""
    torch.manual_seed(3)
    nets = [[torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)] for _ in range(2)]
    twin = nets[1]
    for one, other in zip(*nets):
        other.load_state_dict(one.state_dict())
    opts = [
        p3kv.torch.Optimizer(one, torch.optim.Adam(one.parameters()), updates="workers")
        for one in nets[0]
    ]
    its = [torch.optim.Adam(one.parameters()) for one in twin]
    alone = Alone(torch.nn.ModuleList(twin), opts[0].num_workers)

    def of_critic(pair: Sequence[torch.nn.Module], step: int, rank: int) -> torch.Tensor:
        z = data(step, rank)
        return pair[1](z[:, 3:]).mean() - pair[1](pair[0](z[:, :3]).detach()).mean()

    def of_generator(pair: Sequence[torch.nn.Module], step: int, rank: int) -> torch.Tensor:
        return pair[1](pair[0](data(step, rank)[:, :3])).mean() ** 2

    for step in range(4):
        for at, loss in ((1, of_critic), (0, of_generator)):
            for one in opts:
                one.zero_grad()
            alone.none()
            loss(nets[0], step, opts[0].rank).backward()
            alone.backward(lambda _, rank, loss=loss, step=step: loss(twin, step, rank))
            opts[at].step()
            its[at].step()
        for one, other in zip(*nets):
            for mine, theirs in zip(one.parameters(), other.parameters()):
                assert torch.equal(mine, theirs)


for name in sys.argv[1:]:
    globals()[name]()
    print(f"right: {name}")
