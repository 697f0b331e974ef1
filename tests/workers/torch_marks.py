"""Reads data between steps, and waits for worker 1, which is slow: both must show in the parts of
a step."""

import p3kv.torch  # noqa: I001
import time
from typing import Dict

import torch

STEPS, WARM_UP = 10, 2
READS_S, SLOW_S = 0.15, 0.3


def parts(optimizer: p3kv.torch.Optimizer) -> Dict[str, float]:
    stats = optimizer.stats()
    return {name: stats[name] for name in ("script_s", "straggler_s", "step_s")}


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    slow_s = SLOW_S * (optimizer.rank == 1)
    for step in range(STEPS):
        if step == WARM_UP:
            before = parts(optimizer)
        loss = model(torch.ones(8, 300)).square().mean()
        optimizer.zero_grad()
        time.sleep(slow_s)
        loss.backward()
        optimizer.step()
        optimizer.wait()  # as a script that saves its weights
        time.sleep(READS_S)
    found = {name: value - before[name] for name, value in parts(optimizer).items()}
    read_s = READS_S * (STEPS - WARM_UP - 1)
    assert 0.9 * read_s < found["script_s"] < 1.6 * read_s, found
    if optimizer.rank == 0:
        assert found["straggler_s"] > 0.7 * SLOW_S * (STEPS - WARM_UP - 1), found
    print(f"worker {optimizer.rank} knows where its time goes: {found}")


main()
