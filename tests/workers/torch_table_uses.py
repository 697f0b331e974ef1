"""p3kv.torch.Embedding on two workers: memory, clipping, frozen tables, evaluations, and what is
refused."""

import p3kv.torch  # noqa: I001
import copy
import pickle
import resource
from typing import Any

import torch
from p3kv.worker import this_process
from torch import nn
from torch.nn import functional
from torch_refusals import refused

ROWS, WIDTH = 4_000_000, 64  # a gigabyte
ROW_BYTES = WIDTH * 4


def trained(
    model: nn.Module, kind: type = torch.optim.SGD, **settings: object
) -> p3kv.torch.Optimizer:
    return p3kv.torch.Optimizer(model, kind(model.parameters(), **{"lr": 1.0, **settings}))


def step(optimizer: p3kv.torch.Optimizer, model: nn.Module, ids: Any) -> None:
    optimizer.zero_grad()
    model(torch.tensor([*ids])).sum().backward()
    optimizer.step()


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def take_little_memory() -> None:
    """Each worker gets 8 rows and sends them, and needs no memory for the others."""
    before = resident_bytes()
    table = p3kv.torch.Embedding(ROWS, WIDTH, std=0.0)
    optimizer = trained(table)
    worker, rank = this_process.worker(), optimizer.rank
    right = torch.zeros(ROWS // 100_000)
    for number in range(3):
        ids = torch.arange(8) * 100_000 + 400_000 * rank + 100_000 * number
        counts = worker.stats()
        step(optimizer, table, ids)
        right[ids // 100_000] -= 0.5
        right[(ids + 400_000 * (1 - 2 * rank)) // 100_000] -= 0.5
        found = table(torch.arange(len(right)) * 100_000).detach()
        assert torch.equal(found, right[:, None].expand(-1, WIDTH)), found[:, 0]
        sent, received = (
            worker.stats()[one] - counts[one] for one in ("bytes_sent", "bytes_received")
        )
        assert 8 * ROW_BYTES <= sent <= 9 * ROW_BYTES, sent
        assert 48 * ROW_BYTES <= received <= 49 * ROW_BYTES, received
    grown = resident_bytes() - before
    assert grown < 100e6, grown
    assert table.stats()["rows_pulled"] == 3 * 48
    print("little memory")


def clip() -> None:
    """By the norm of all gradients, dense ones and rows; the table in a model that is moved."""
    torch.manual_seed(1)
    net = nn.Sequential(p3kv.torch.Embedding(50, 8, seed=1), nn.Linear(8, 1)).double()
    optimizer = trained(net)
    twin = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1)).double()
    twin[0].weight.data = net[0](torch.arange(50)).detach()
    twin[1].load_state_dict(net[1].state_dict())
    alone = torch.optim.SGD(twin.parameters(), lr=1.0)
    for number in range(4):
        ids = [(torch.arange(9) + 3 * number + rank) % 50 // 2 for rank in range(2)]
        optimizer.zero_grad()
        alone.zero_grad()
        net(ids[optimizer.rank]).square().mean().backward()
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        for one in ids:
            (twin(one).square().mean() / 2).backward()
        torch.testing.assert_close(norm.double(), nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
        alone.step()
        torch.testing.assert_close(net[0](torch.arange(50)).detach(), twin[0].weight.detach())
    print("clipped")


def freeze() -> None:
    """A frozen table stays as it is; evaluations push nothing."""
    net = nn.Sequential(p3kv.torch.Embedding(50, 8, uniform=True), nn.Linear(8, 1))
    of_all = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = p3kv.torch.Optimizer(net[1], of_all)  # the table is in no part of the model given
    ids = torch.arange(50)
    before = net[0](ids).detach()
    assert before.abs().max() <= 3**0.5 and abs(before.std() - 1) < 0.1
    for number in range(4):
        net[0].weight.requires_grad_(number >= 2)
        step(optimizer, net, range(5))
        with torch.no_grad():
            assert torch.equal(net[0](ids), before) == (number < 2)
    net.eval()
    with torch.no_grad():
        assert torch.equal(net[0](ids[7:9].int())[1], net[0](ids[8]))
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, net, range(5))
    print("frozen")


def prefetch() -> None:
    """Rows that were named before are there when a pass reads them: it waits for nothing."""
    table = p3kv.torch.Embedding(1000, 8)
    optimizer = trained(table)
    for number in range(4):
        ids = torch.arange(6) + 4 * number + 2 * optimizer.rank
        optimizer.zero_grad()
        before = table.stats()
        found = table(ids)
        after = table.stats()
        assert after["rows_prefetched"] - before["rows_prefetched"] == (6 if number else 0)
        assert after["rows_pulled"] - before["rows_pulled"] == (0 if number else 6)
        assert number == 0 or after["waits"] == before["waits"]
        if number % 2:
            table.prefetch(ids + 4)
        found.sum().backward()
        optimizer.step()
        if number % 2 == 0:
            table.prefetch(ids + 4)
        optimizer.wait()
    print("prefetched")


def cache() -> None:
    """A row that the other worker has changed comes again, and no others do."""
    table = p3kv.torch.Embedding(1000, WIDTH, std=0.0, cache_rows=8)
    optimizer = trained(table)
    worker, rank = this_process.worker(), optimizer.rank
    right = torch.zeros(1000)

    def read(ids: torch.Tensor, hits: int, changed: int, misses: int) -> None:
        before, received = table.stats(), worker.stats()["bytes_received"]
        with torch.no_grad():
            assert torch.equal(table(ids), right[ids][:, None].expand(-1, WIDTH))
        received = worker.stats()["bytes_received"] - received
        counts = {name: count - before[name] for name, count in table.stats().items()}
        found = [counts[f"cache_{name}"] for name in ("hits", "changed", "misses")]
        assert found == [hits, changed, misses], found
        assert received == (changed + misses) * ROW_BYTES, received

    ids = torch.arange(8) + 500 * rank
    read(ids, 0, 0, 8)
    read(ids.flip(0), 8, 0, 0)
    read(ids[1:], 7, 0, 0)
    step(optimizer, table, [500 * (1 - rank) + 3])  # the other worker's; here it evicts the first
    right[[3, 503]] -= 0.5
    assert table.stats()["cache_evictions"] == 1
    read(ids[1:], 6, 1, 0)
    step(optimizer, table, [999])  # which evicts the other worker's
    right[999] -= 1
    read(ids[2:], 6, 0, 0)
    assert table.stats()["cache_evictions"] == 2
    read(ids[:2], 1, 0, 1)
    print("cached")


def refuse() -> None:
    table = p3kv.torch.Embedding(50, 8)
    refused("before its rows are on the servers", lambda: table(torch.arange(3)))
    twice = copy.deepcopy(table)
    assert twice.weight is not table.weight and twice.weight.shape == (50, 8)
    refused("SGD with momentum", lambda: trained(table, momentum=0.9))
    refused("use Adagrad, SGD, SparseAdam", lambda: trained(table, torch.optim.Adam))
    local = torch.optim.SGD(table.parameters(), lr=1.0), None, "local:steps=2"
    refused("here workers update weights", p3kv.torch.Optimizer, table, *local)
    optimizer = trained(table, torch.optim.SparseAdam)
    step(optimizer, table, [1, 2])
    for call in (table, table.prefetch):
        for ids in ([3, 50], [-1]):
            refused("rows 0 to 49", call, torch.tensor(ids), kind=IndexError)
    refused("float32 or float64", table.half)
    refused(
        "the weight 'weight' of a p3kv.torch.Embedding was used by linear",
        lambda: functional.linear(torch.ones(1, 8), table.weight),
    )
    refused("std= and seed= initialise it", lambda: nn.init.zeros_(table.weight))
    refused("rows are on the servers", lambda: table.weight.data)
    refused("can't be copied", lambda: copy.deepcopy(table))
    refused("can't be pickled", lambda: pickle.dumps(table))
    refused("can't be loaded", lambda: table.load_state_dict({"weight": torch.ones(50, 8)}))
    refused("another one can't take them over", lambda: trained(table))
    assert not table.state_dict() and not optimizer.state_dict()["state"]
    optimizer.zero_grad()
    table(torch.tensor([1, 2])).sum().backward()
    refused("between backward", lambda: table(torch.tensor([1])))
    optimizer.step()
    table(torch.tensor([1]))
    print("refused")


take_little_memory()
clip()
freeze()
prefetch()
cache()
refuse()
