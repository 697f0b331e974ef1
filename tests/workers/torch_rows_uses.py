"""Embeddings with sparse gradients under p3kv.torch, on two workers: bytes, clipping, half
precision, frozen tables, and what is refused. With the argument "codecs": rounded values; with
"on_hosts": without bytes, since the workers of a host share them."""

import p3kv.torch  # noqa: I001
import sys
from typing import Iterable

import torch
from p3kv.worker import this_process
from torch import nn
from torch.nn import functional
from torch_refusals import refused

ROWS, WIDTH = 20_000, 16
ROW_BYTES = WIDTH * 4
HEADERS_BYTES = 64
"""More than requests and answers have besides rows; frames' headers are not counted."""


def table(rows: int = ROWS, width: int = WIDTH) -> nn.Embedding:
    one = nn.Embedding(rows, width, sparse=True)
    nn.init.ones_(one.weight)
    return one


def trained(
    model: nn.Module, kind: type = torch.optim.SGD, **settings: object
) -> p3kv.torch.Optimizer:
    return p3kv.torch.Optimizer(model, kind(model.parameters(), **{"lr": 1.0, **settings}))


def step(optimizer: p3kv.torch.Optimizer, model: nn.Module, ids: Iterable[int]) -> None:
    optimizer.zero_grad()
    model(torch.tensor([*ids])).sum().backward()
    optimizer.step()


def send_few_bytes() -> None:
    """Each worker sends its own 8 rows, and gets the 12 that both have."""
    model = table()
    optimizer = trained(model)
    worker, rank = this_process.worker(), optimizer.rank
    expected = torch.ones(ROWS)
    for number in range(5):
        own = range(1000 * number + 4 * rank, 1000 * number + 4 * rank + 8)
        before = worker.stats()
        step(optimizer, model, own)
        optimizer.wait()
        now = worker.stats()
        sent, received = (now[one] - before[one] for one in ("bytes_sent", "bytes_received"))
        assert 8 * ROW_BYTES <= sent <= 8 * ROW_BYTES + HEADERS_BYTES, sent
        assert 12 * ROW_BYTES <= received <= 12 * ROW_BYTES + HEADERS_BYTES, received
        first = 1000 * number
        expected[first : first + 12] -= 0.5
        expected[first + 4 : first + 8] -= 0.5
        assert torch.equal(model.weight.detach(), expected[:, None].expand(-1, WIDTH))
    print("few bytes")


def clip() -> None:
    """By the norm of all gradients, dense ones and rows, as with a dense table."""
    torch.manual_seed(1)
    net, twin = (nn.Sequential(table(50), nn.Linear(WIDTH, 1)) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    twin[0].sparse = False
    optimizer, alone = trained(net), torch.optim.SGD(twin.parameters(), lr=1.0)
    for number in range(4):
        ids = [(torch.arange(9) + 3 * number + rank) % 50 // 2 for rank in range(2)]
        optimizer.zero_grad()
        alone.zero_grad()
        net(ids[optimizer.rank]).square().mean().backward()
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        for one in ids:
            (twin(one).square().mean() / 2).backward()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        alone.step()
        for one, other in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(one.detach(), other.detach())
    print("clipped")


def train_in_half_precision() -> None:
    """Changes too small for bfloat16 add up in the servers' copy."""
    model = table(40, 4).to(torch.bfloat16)
    optimizer = trained(model, lr=2.0**-10)
    for number in range(1, 9):
        step(optimizer, model, [2, 3 + optimizer.rank])
        expected = torch.ones(40)
        expected[2] -= number * 2.0**-10
        expected[3:5] -= number * 2.0**-11
        rounded = expected.to(torch.bfloat16)[:, None].expand(-1, 4)
        assert torch.equal(model.weight.detach(), rounded), number
    saved = optimizer.state_dict()
    assert torch.equal(saved["state"][0]["master_param"], expected[:, None].expand(-1, 4))
    optimizer.load_state_dict(saved)
    step(optimizer, model, [2, 3 + optimizer.rank])
    again = optimizer.state_dict()["state"][0]["master_param"]
    expected[2] -= 2.0**-10
    expected[3:5] -= 2.0**-11
    assert torch.equal(again, expected[:, None].expand(-1, 4))
    print("half precision")


def freeze() -> None:
    """On one worker while the other trains, and on all while the script writes."""
    model = table(30, 2)
    optimizer = trained(model)
    step(optimizer, model, [1, 2])
    if optimizer.rank == 1:
        model.weight.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        if optimizer.rank == 0:
            model(torch.tensor([2, 3])).sum().backward()
        optimizer.step()
    expected = torch.ones(30, 2)
    expected[1] -= 1
    expected[2] -= 2
    expected[3] -= 1
    assert torch.equal(model.weight.detach(), expected)
    model.weight.requires_grad_(False)
    optimizer.zero_grad()
    model.weight[7] = 5
    optimizer.step()
    assert torch.equal(model.weight[7], torch.full((2,), 5.0))
    model.weight[7] = 1
    model.weight.requires_grad_(True)
    optimizer.step()  # nobody has a gradient
    step(optimizer, model, [7])
    expected[7] -= 1
    assert torch.equal(model.weight.detach(), expected)
    print("frozen")


def refuse() -> None:
    by_rows = "is sparse, and servers can't update single rows by "
    for kind, settings, words in [
        (torch.optim.SGD, {"momentum": 0.9}, "SGD with momentum"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, "Adagrad with weight_decay"),
        (torch.optim.AdamW, {}, "AdamW with weight_decay"),
        (torch.optim.Adam, {}, "Adam,"),
    ]:
        model = nn.Sequential(table(5, 2))
        inner = kind(model.parameters(), lr=1.0, **settings)
        by_servers = (p3kv.torch.Optimizer, model, inner, None, None, "servers")
        refused(f"'0.weight' {by_rows}{words}", *by_servers)
    for one in (nn.Embedding(5, 2, max_norm=1.0), nn.EmbeddingBag(5, 2, max_norm=1.0, sparse=True)):
        by_servers = (one, torch.optim.SGD(one.parameters(), lr=1.0), None, None, "servers")
        refused("'weight' has max_norm=1.0, by which it writes", p3kv.torch.Optimizer, *by_servers)
    ids = torch.tensor([1, 2])
    tied = nn.Sequential(table(5, 2), nn.Linear(2, 5, bias=False))
    tied[1].weight = tied[0].weight
    trained(tied)
    refused("'0.weight' is not sparse by rows", tied(ids).sum().backward)
    dense = nn.Linear(2, 2)
    trained(dense, torch.optim.SparseAdam)
    refused("is not sparse by rows", dense(torch.ones(1, 2)).sum().backward)
    plain = nn.Embedding(5, 2)
    trained(plain)
    read = functional.embedding(ids, plain.weight, sparse=True)
    refused("the gradient of 'weight' is sparse, and nothing said so", read.sum().backward)
    later = table(5, 2)
    optimizer = trained(later)
    step(optimizer, later, [1])
    optimizer.param_groups[0]["momentum"] = 0.9
    refused("SGD with momentum", step, optimizer, later, [1])
    for write in (lambda weight: weight.data.mul_(2), lambda weight: weight[4].fill_(3)):
        model = table(5, 2)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = p3kv.torch.Optimizer(model, inner, updates="servers")
        for number in range(6):
            step(optimizer, model, [number % 3])
        with torch.no_grad():
            write(model.weight)
        refused("has written to the weight 'weight'", step, optimizer, model, [1])
    print("refused")


def train_beside_tables_without_elements() -> None:
    """As a layer of width 0 has: nothing travels of it, and its neighbours learn."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([table(5, 0), table(0, 3), table(6, 2)])
            self.bag = nn.EmbeddingBag(5, 0, mode="sum", sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            narrow, empty, used = self.tables
            without = narrow(ids).sum() + empty(ids[:0]).sum() + self.bag(ids[None]).sum()
            return used(ids) + without

    model = Net()
    optimizer = trained(model)
    for _ in range(3):
        step(optimizer, model, [1, 4])
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, model, [1, 4])
    expected = torch.ones(6, 2)
    expected[[1, 4]] = -3.0
    assert torch.equal(model.tables[2].weight.detach(), expected)


def round_values() -> None:
    """By codecs of rows; `synchronize` gives the servers' own values."""
    model = table(30, 2)
    optimizer = trained(model, lr=2.0**-13)
    for number in range(2):
        step(optimizer, model, [number])
    optimizer.wait()
    assert torch.equal(model.weight.detach(), torch.ones(30, 2))
    optimizer.synchronize()
    expected = torch.ones(30, 2)
    expected[:2] -= 2.0**-13
    assert torch.equal(model.weight.detach(), expected)
    print("rounded")


if sys.argv[1:] == ["codecs"]:
    round_values()
else:
    if sys.argv[1:] != ["on_hosts"]:
        send_few_bytes()
    clip()
    train_in_half_precision()
    freeze()
    train_beside_tables_without_elements()
    refuse()
