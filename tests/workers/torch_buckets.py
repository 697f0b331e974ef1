"""Small parameters travel together: the numbers of one process whatever each worker uses, freezes
and writes, with Adam's count of steps of each.
"""

import p3kv.torch  # noqa: I001
import copy
import random
from typing import Any, List

import torch
from p3kv.frontends.torch.values.bucket import Joinable, buckets_of
from p3kv.worker import this_process
from torch import nn

from joined_batch import mean_gradients
from torch_refusals import refused

STEPS, LAYERS = 12, 5


def what_is_alike_is_joined() -> None:
    """By group, dtype and size; 32 at most, and no more elements than a slice has."""

    def joined(sizes: List[int], groups: List[Any], slice_elems: int = 50_000) -> List[List[int]]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        found = [Joinable(at, one, "w", groups[at]) for at, one in enumerate(parameters)]
        return [[one.number for one in bucket] for bucket in buckets_of(found, slice_elems)]

    assert joined([1, 260_000, 2, 3], [0, 0, 0, 0]) == [[0, 2, 3], [1]]
    assert joined([1, 2, 3, 4], [0, 1, 0, 1]) == [[0, 2], [1, 3]]
    assert joined([1, 2, 0, 4], [0, None, 0, 0]) == [[0, 3], [1], [2]]
    assert joined([6, 6, 6], [0, 0, 0], slice_elems=13) == [[0, 1], [2]]
    assert joined([40_000] * 4, [0] * 4, slice_elems=100_000) == [[0, 1], [2, 3]]
    assert joined([9, 260_000, 9], [0] * 3, slice_elems=400_000) == [[0, 2], [1]]
    assert [len(one) for one in joined([1] * 40, [0] * 40)] == [32, 8]
    mixed = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.half, torch.float)]
    assert len(buckets_of([Joinable(at, one, "w", 0) for at, one in enumerate(mixed)], 100)) == 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.used: List[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.used:
            x = x + self.layers[at](x).tanh()
        return x


def prepare(net: Net, step: int, rank: int) -> torch.Tensor:
    """What a worker uses and has frozen in a step, and its batch."""
    chance = random.Random(1000 * step + rank)
    net.used = [at for at in range(LAYERS) if step % 3 == 0 or chance.random() < 0.6]
    for at, layer in enumerate(net.layers):
        layer.requires_grad_(not (step % 4 == 3 and at == step % LAYERS))
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net(x).square().mean()
    return y if y.requires_grad else torch.zeros((), requires_grad=True)


def one_process(net: Net, optimizer: torch.optim.Optimizer, step: int, workers: int) -> None:
    gradients = mean_gradients(net, lambda own, at: loss(own, prepare(own, step, at)), workers)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(True)
        parameter.grad = gradients.get(name)
    optimizer.step()


def one_hook_does_while_the_order_stays() -> None:
    """torch tells of a bucket's last gradient alone once their order has been the same in some
    steps, and of all again when it changes, or when gradients add up."""
    every = [*range(LAYERS)]
    steps = [  # the layers that are used, and how many hooks there are then
        *[(every, 10)] * 3,
        *[(every, 1)] * 3,
        *[(every[::-1], 10)] * 4,
        (every[::-1], 1),
        (every[:3], 10),
        (every, 10),
    ]
    torch.manual_seed(6)
    net = Net()
    expected = copy.deepcopy(net)
    opt = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)

    def loss_of(own: Net, used: List[int], step: int, rank: int) -> torch.Tensor:
        own.used = used
        seed = torch.Generator().manual_seed(10 * step + rank)
        return own(torch.randn(3, 4, generator=seed)).square().mean()

    def compare(used: List[int], step: int) -> None:
        opt.step()
        gradients = mean_gradients(
            expected, lambda own, rank: loss_of(own, used, step, rank), opt.num_workers
        )
        for name, parameter in expected.named_parameters():
            parameter.grad = gradients.get(name)
        reference.step()
        for one, other in zip(net.parameters(), expected.parameters()):
            torch.testing.assert_close(one.detach(), other.detach(), msg=f"step {step}")

    def hooks() -> int:
        return sum(len(one._post_accumulate_grad_hooks or ()) for one in net.parameters())

    for step, (used, expected_hooks) in enumerate(steps):
        opt.zero_grad()
        loss_of(net, used, step, opt.rank).backward()
        compare(used, step)
        assert hooks() == expected_hooks, (step, hooks())
    for step in range(20, 26):
        opt.zero_grad()
        loss_of(net, every, step, opt.rank).backward()
        compare(every, step)
    assert hooks() == 1
    opt.zero_grad()
    loss_of(net, every, step, opt.rank).backward()
    loss_of(net, every[1:], step, opt.rank).backward()  # without the one that has a hook
    refused("was written to in place", opt.step)
    net = copy.deepcopy(expected)
    opt = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(30, 36):
        opt.zero_grad()
        loss_of(net, every, step, opt.rank).backward()
        opt.wait()
        opt.step()
    assert hooks() == 1
    opt.zero_grad()
    with opt.no_sync():
        assert hooks() == 10
        loss_of(net, every, 40, opt.rank).backward()
    loss_of(net, every, 40, opt.rank).backward()
    refused("a second backward pass adds to it", loss_of(net, every, 40, opt.rank).backward)
    net.layers[2].weight.grad.data.mul_(2)
    refused("'layers.2.weight' was written to", opt.step)


def what_lacks_a_gradient_is_told_also_by_a_rule_that_lets_workers_go_ahead() -> None:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    opt = p3kv.torch.Optimizer(model, inner, consistency="delayed:staleness=1")
    unused = model[1].weight.detach().clone()
    for _ in range(3):
        opt.zero_grad()
        model[0](torch.ones(1, 2)).sum().backward()
        opt.step()
    opt.synchronize()
    assert torch.equal(model[1].weight, unused)


def main() -> None:
    what_is_alike_is_joined()
    what_lacks_a_gradient_is_told_also_by_a_rule_that_lets_workers_go_ahead()
    one_hook_does_while_the_order_stays()
    torch.manual_seed(5)
    net = Net()
    expected = copy.deepcopy(net)
    opt = p3kv.torch.Optimizer(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    reference = torch.optim.AdamW(expected.parameters(), lr=0.01)
    keys = this_process.worker().stats()["slices_sent"]
    for step in range(STEPS):
        opt.zero_grad()
        loss(net, prepare(net, step, opt.rank)).backward()
        opt.step()
        one_process(expected, reference, step, opt.num_workers)
        for (name, one), other in zip(net.named_parameters(), expected.parameters()):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6, msg=name)
        theirs = [reference.state[one].get("step") for one in expected.parameters()]
        assert [opt.state[one].get("step") for one in net.parameters()] == theirs, step
    sent = this_process.worker().stats()["slices_sent"] - keys
    assert sent <= STEPS, sent  # and not ten times as many
    with torch.no_grad():  # a frozen weight is the script's own, also beside others that train
        frozen = net.layers[0].requires_grad_(False).weight
        frozen.fill_(3.0)
    net.used = [1]
    for _ in range(2):
        opt.zero_grad()
        loss(net, torch.ones(1, 4)).backward()
        opt.step()
        assert (frozen == 3.0).all()
    opt.wait()
    print("right in buckets")


main()
