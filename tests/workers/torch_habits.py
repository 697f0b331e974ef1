"""What scripts do beside a plain loop, each with p3kv.torch and with torch alone.

Two workers, whose gradients differ. Argument: which check; by default all.
"""

import p3kv.torch  # noqa: I001
import copy
import sys
import threading
import time
from typing import Any, Callable, List

import torch
from p3kv.worker import this_process
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch_refusals import refused

WORKERS = 2
Build = Callable[[], nn.Module]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def small() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def trained(model: nn.Module, **options: str) -> p3kv.torch.Optimizer:
    return p3kv.torch.Optimizer(model, sgd(model), **options)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Pair:
    """A model that p3kv.torch trains, and its twin, which this process trains with all workers'
    batches."""

    def __init__(self, build: Build = small, **options: str) -> None:
        self.model = build()
        self.twin = copy.deepcopy(self.model)
        self.optimizer = trained(self.model, **options)
        self.alone = sgd(self.twin)
        self.rank = this_process.worker().rank
        self.steps = 0

    def step(self, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of) -> None:
        self.optimizer.zero_grad()
        loss(self.model, batch(self.steps, self.rank)).backward()
        self.optimizer.step()
        self.alone.zero_grad()
        for rank in range(WORKERS):
            (loss(self.twin, batch(self.steps, rank)) / WORKERS).backward()
        self.alone.step()
        self.steps += 1

    def step_alone(self, batches: List[torch.Tensor], max_norm: float) -> None:
        """The twin's step by the mean of these batches' gradients, clipped."""
        self.alone.zero_grad()
        for x in batches:
            (loss_of(self.twin, x) / len(batches)).backward()
        nn.utils.clip_grad_norm_(self.twin.parameters(), max_norm)
        self.alone.step()

    def check(self) -> None:
        expected = self.twin.state_dict()
        for name, value in self.model.state_dict().items():
            torch.testing.assert_close(
                value, expected[name], msg=lambda text, name=name: f"{name}: {text}"
            )


# Weights that the script writes.


def weights_are_loaded_in_mid_training() -> None:
    """Workers update then; where only servers may, it is refused."""
    pair = Pair()
    for _ in range(2):
        pair.step()
        for net in (pair.model, pair.twin):
            net.load_state_dict({name: one / 2 for name, one in net.state_dict().items()})
    pair.step()
    assert pair.optimizer.updates == "workers"
    pair.check()
    pair = Pair(updates="servers")
    other = {name: value + 1 for name, value in pair.model.state_dict().items()}
    pair.model.load_state_dict(pair.model.state_dict())  # the same values
    pair.step()
    before = copy.deepcopy(pair.model.state_dict())
    pair.model.load_state_dict(other)
    pair.model.load_state_dict(before)  # as for an evaluation
    pair.step()
    pair.model.load_state_dict(other)
    refused("has written to the weight '2.bias'", pair.step)
    fresh = Pair(updates="servers")
    fresh.model.load_state_dict(other)
    refused("has written to the weight '2.bias'", fresh.step)
    clamped = Pair(updates="servers")
    clamped.step()
    for parameter in clamped.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    refused("has written to the weight", clamped.step)
    one = Pair(updates="servers")
    for _ in range(5):  # it would not be its turn
        one.step()
    one.model[0].weight.data.clamp_(-0.01, 0.01)
    refused("has written to the weight '0.weight'", one.step)
    widened = Pair(updates="servers")
    widened.model.double()
    loss = loss_of(widened.model, batch(0, 0).double())
    refused("' is torch.float64 of shape ", loss.backward)


def a_new_optimizer_takes_written_weights() -> None:
    pair = Pair()
    pair.step()
    pair.step()
    state = pair.optimizer.state_dict()
    for model in (pair.model, pair.twin):
        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    older = pair.optimizer
    pair.optimizer = trained(pair.model)
    pair.optimizer.load_state_dict(state)
    pair.step()
    pair.step()
    pair.check()
    refused("another p3kv.torch.Optimizer has been made", older.step)


def a_new_optimizer_that_is_refused_leaves_the_older_one() -> None:
    pair = Pair()
    pair.step()
    threads = threading.active_count()
    pair.model.register_buffer("mask", torch.ones(3).to_sparse())
    refused("the buffer 'mask' is", trained, pair.model)
    del pair.model.mask
    assert threading.active_count() == threads
    pair.step()
    pair.check()


def frozen_weights_are_the_script_s_own() -> None:
    """As momentum encoders, which scripts give the optimizer, too."""

    def average(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.data = model[0].weight.data * 0.9 + 0.1 * model[2].weight.data.mean()

    pair = Pair()
    for model in (pair.model, pair.twin):
        model[0].weight.requires_grad_(False)
    for _ in range(4):
        pair.step()
        average(pair.model)
        average(pair.twin)
    pair.optimizer.synchronize()
    pair.check()


def a_weight_is_frozen_and_thawed() -> None:
    pair = Pair()
    for frozen in (False, True, True, False, False):
        for model in (pair.model, pair.twin):
            model[0].weight.requires_grad_(not frozen)
        pair.step()
    pair.check()


def strides_may_differ() -> None:
    """Values travel in the order of a contiguous tensor."""

    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 2)
        )

    def differing() -> nn.Module:
        model = build()
        if this_process.worker().rank:
            model[1].to(memory_format=torch.channels_last)
            model[3].weight.data = torch.randn(8, 2)[::2].t()  # not dense
        return model

    pair = Pair(differing)
    assert pair.model[1].weight.is_contiguous() == (pair.rank == 0)
    pair.twin.load_state_dict(pair.model.state_dict())
    for _ in range(4):
        pair.step()
    pair.check()
    states = pair.optimizer.state_dict()["state"]
    for parameter, state in zip(pair.twin.parameters(), states.values()):
        expected = pair.alone.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(state["momentum_buffer"], expected)
    shared = nn.Linear(4, 2)
    shared.weight.data = torch.ones(1).expand(2, 4)
    refused("elements of the parameter 'weight', of shape (2, 4), share memory", trained, shared)
    refused("the parameter 'weight' has no shape yet", trained, nn.LazyLinear(3))


# Other ways to compute.


class Shared(nn.Module):
    """One layer in two segments whose activations are computed again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=self.reentrant))
        return self.out(x)


def activations_are_computed_again() -> None:
    pair = Pair(lambda: Shared(False))
    for _ in range(4):
        pair.step()
    pair.check()
    partial = Pair(lambda: Shared(True))
    for _ in range(3):
        partial.step()
    partial.check()
    assert partial.optimizer.updates == "workers"
    assert pair.optimizer.updates == "servers"
    pair = Pair(lambda: Shared(True))
    for _ in range(3):
        with pair.optimizer.no_sync():
            pair.step()
    pair.check()


class Scaled(torch.autograd.Function):
    """Takes parameters, has a gradient of one of them, and none of the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, other: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight + 0 * other

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), None


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.full((4,), 2.0)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight, self.other)


def functions_take_parameters() -> None:
    pair = Pair(OwnFunction)
    for _ in range(4):
        pair.step()
    pair.check()
    assert pair.model.other.grad is None


def averages_are_evaluated_in_mid_training() -> None:
    pair = Pair()
    average = get_ema_multi_avg_fn(0.5)
    averages = [AveragedModel(one, multi_avg_fn=average) for one in (pair.model, pair.twin)]
    for step in range(4):
        pair.step()
        if step % 2:
            pair.model.eval()
            with torch.inference_mode():  # the first to read
                torch.testing.assert_close(pair.model(batch(99, 0)), pair.twin(batch(99, 0)))
            pair.model.train()
        for averaged, model in zip(averages, (pair.model, pair.twin)):
            averaged.update_parameters(model)
        mine, theirs = (one.eval()(batch(99, 0)) for one in averages)
        torch.testing.assert_close(mine, theirs)
        copied = copy.deepcopy(pair.model)
        torch.testing.assert_close(copied.state_dict(), pair.twin.state_dict())
        trained_apart = sgd(copied)
        loss_of(copied, batch(0, 0)).backward()  # a copy's gradients stay here
        trained_apart.step()
    pair.check()


def two_losses_reach_a_weight() -> None:
    """As a GAN's."""
    generator, critic = Pair(), Pair(lambda: nn.Linear(2, 1))

    def of_generator(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        judge = critic.model if model is generator.model else critic.twin
        return judge(model(x)).mean()

    def of_critic(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        maker = generator.model if model is critic.model else generator.twin
        return model(maker(x).detach()).square().mean()

    for _ in range(3):
        critic.step(of_critic)
        with critic.optimizer.no_sync():
            generator.step(of_generator)
    critic.check()
    generator.check()
    generator.step(of_generator)  # whose gradients leave, and the critic's are zeroed
    critic.step(of_critic)
    assert critic.optimizer.updates == "workers" and generator.optimizer.updates == "servers"
    critic.check()
    generator.check()
    only_servers = Pair(updates="servers")
    only_servers.step()
    loss_of(only_servers.model, batch(0, 0)).backward()
    refused("those of other losses that reach the weight", only_servers.step)


class Batches(torch.utils.data.Dataset):
    """Reads the model, too, in the loader's processes."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model, self.rank = model, rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> torch.Tensor:
        assert torch.isfinite(self.model[0].weight).all()
        return batch(at, self.rank)


def loaders_fork() -> None:
    pair = Pair()
    forking = torch.multiprocessing.get_context("fork")
    for _ in range(2):
        if pair.rank == 1:
            time.sleep(0.3)  # so the other's values are late when it forks
        for x in torch.utils.data.DataLoader(
            Batches(pair.model, pair.rank), None, num_workers=2, multiprocessing_context=forking
        ):
            assert torch.equal(x, batch(pair.steps % 4, pair.rank))
            pair.step()
    pair.check()


CHECKS: List[Callable[[], None]] = [
    weights_are_loaded_in_mid_training,
    a_new_optimizer_takes_written_weights,
    a_new_optimizer_that_is_refused_leaves_the_older_one,
    frozen_weights_are_the_script_s_own,
    a_weight_is_frozen_and_thawed,
    strides_may_differ,
    activations_are_computed_again,
    functions_take_parameters,
    averages_are_evaluated_in_mid_training,
    two_losses_reach_a_weight,
    loaders_fork,
]


def main() -> None:
    for check in CHECKS:
        if sys.argv[1:] in ([], [check.__name__]):
            check()
            print("right:", check.__name__)


if __name__ == "__main__":
    main()
