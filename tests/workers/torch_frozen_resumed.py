"""A layer is frozen in steps 3 to 6, of which a checkpoint is written, and values are rounded on
their way: writes the weights after the last step, which must be those of an undisturbed job."""

import p3kv.torch  # noqa: I001
import sys

import torch

FROZEN, STEPS = range(3, 7), 9


def main() -> None:
    path, ends_after = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 1))
    optimizer = p3kv.torch.Optimizer(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(1, STEPS + 1):
        model[0].requires_grad_(step not in FROZEN)
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        if step <= optimizer.resumed_steps:
            continue
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        if step == ends_after:
            break
    optimizer.wait()
    torch.save(model.state_dict(), f"{path}{optimizer.rank}")


main()
