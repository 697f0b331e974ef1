"""A weight is frozen for some steps while a codec rounds values. Nobody trains it, so it stays as
it is, and trains on when it is thawed. Before a checkpoint values are exact, so what comes while it
is frozen is rounded otherwise than what it has."""

import p3kv.torch  # noqa: I001
import torch

STEPS, FROZEN = 12, range(4, 7)


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    optimizer = p3kv.torch.Optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
    weight = model[0].weight
    for step in range(STEPS):
        weight.requires_grad_(step not in FROZEN)
        optimizer.zero_grad()
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step + optimizer.rank))
        model(x).square().mean().backward()
        optimizer.step()
        if step == FROZEN[0]:
            frozen = weight.detach().clone()  # perhaps of the step before
        elif step in FROZEN:
            assert torch.equal(weight.detach(), frozen)
    assert not torch.equal(weight.detach(), frozen)
    print("trains on")


main()
