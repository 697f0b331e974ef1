"""Gradients that a script reads for the first time after its first step, while servers update:
those of DistributedDataParallel, bit for bit, computed from what each rank's
`backward` has made. Arguments: which checks; by default all."""

import p3kv.torch.ddp  # noqa: F401, I001
import copy
import itertools
import sys
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_refusals import refused

WORKERS = 2
ONLY = "Set P3KV_UPDATES=workers"
Grads = List[torch.Tensor]


class Training:
    """A wrapped model, and the means of the gradients that all ranks' backward passes have made."""

    def __init__(self, model: nn.Module, **made: Any) -> None:
        self.wrapped = DDP(model)
        self.weights = [*self.wrapped.parameters()]
        self.optimizer: Any = torch.optim.SGD(self.weights, lr=0.05, momentum=0.5, **made)
        self._own: Dict[int, torch.Tensor] = {}
        for at, one in enumerate(self.weights):
            one.register_post_accumulate_grad_hook(
                lambda one, at=at: self._own.__setitem__(at, one.grad.clone())
            )

    def backward(self, step: int, scale: float = 1.0, part: int = 0) -> None:
        numbers = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
        dtype = self.weights[0].dtype
        x = torch.randn(3, 4, generator=numbers).to(dtype)
        (scale * self.wrapped(x).square().mean()).backward()

    def means(self) -> Grads:
        """Of all ranks, which call it."""
        found = []
        for at, one in enumerate(self.weights):
            own = self._own.pop(at, torch.zeros_like(one)).float()
            every = [torch.empty_like(own) for _ in range(WORKERS)]
            dist.all_gather(every, own)
            found.append((every[0] + every[1]) / WORKERS)
        return found

    def equal(self, means: Grads) -> None:
        for one, mean in zip(self.weights, means):
            assert torch.equal(one.grad, mean.to(one.dtype)), (one.grad - mean).abs().max()

    def ends(self) -> None:
        """Weights are the same on all, and servers have updated them."""
        assert self.optimizer.updates == "servers"
        for one in self.weights:
            every = [torch.empty_like(one) for _ in range(WORKERS)]
            dist.all_gather(every, one.detach().clone())
            assert torch.equal(*every)


def small(middle: int = 8) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, middle), nn.Tanh(), nn.Linear(middle, 2))


def large() -> nn.Module:
    """Of tensors that travel together, and one that travels in slices, to all servers."""
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 500), nn.Linear(500, 2))


def read_each_third_step() -> None:
    """Before step, after it, and both; by all ranks, and by the first one alone."""
    every = itertools.product((small,), ((0, 1), (0,)), ("before", "after", "both"))
    some = (large, (0, 1), "both"), (large, (0,), "before"), (large, (1,), "after")
    for make, ranks, when in (*every, *some):
        it = Training(make())
        for step in range(8):
            it.optimizer.zero_grad()
            it.backward(step)
            means = it.means()
            reads = step % 3 == 1 and dist.get_rank() in ranks
            if reads and when != "after":
                it.equal(means)
            it.optimizer.step()
            if reads and when != "before":
                it.equal(means)
        it.ends()


def uses_of_all_kinds() -> None:
    """Numbers, copies, memory, histograms, and norms of torch's own."""

    def aliases(one: torch.Tensor) -> torch.Tensor:
        alias = one.data
        return alias.view(-1).view(alias.shape)

    uses: List[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.Tensor.clone,
        aliases,
        copy.deepcopy,
        lambda one: torch.from_numpy(one.numpy().copy()),
        lambda one: torch.tensor(one.tolist()),
        lambda one: torch.stack([one])[0],
        torch.Tensor.detach,
    ]
    for in_step, use in itertools.product((True, False), uses):
        it = Training(small())
        for step in range(5):
            it.optimizer.zero_grad(set_to_none=bool(step % 2))
            it.backward(step)
            means = it.means()
            if not in_step:
                it.optimizer.step()
            if step in (2, 3):
                for one, mean in zip(it.weights, means):
                    assert torch.equal(use(one.grad), mean)
                norms = torch._foreach_norm([one.grad for one in it.weights])
                assert norms[0] == means[0].norm()
                assert nn.utils.get_total_norm([one.grad for one in it.weights]) > 0
                means[0].histc(), it.weights[0].grad.histc()
            if in_step:
                it.optimizer.step()
        it.ends()


def passes_add_up() -> None:
    """The mean is there after the pass that exchanges; before, each rank's own is, as with DDP. A
    gradient that stays from step to step adds up as there."""
    for sets_to_none in (True, False):
        it = Training(large())
        for step in range(6):
            it.optimizer.zero_grad(set_to_none=sets_to_none)
            with it.wrapped.no_sync():
                it.backward(step)
                assert torch.equal(it.weights[0].grad, it._own[0])
            it.backward(step, part=1)
            means = it.means()
            if step in (2, 4):
                it.equal(means)
            it.optimizer.step()
            if step > 2:
                it.equal(means)
        it.ends()
    it = Training(small())
    sums = [torch.zeros_like(one) for one in it.weights]
    for step in range(6):  # nothing is zeroed
        it.backward(step)
        means = it.means()
        if step in (2, 3, 5):
            for total, mean in zip(sums, means):
                total.copy_(mean)
            it.equal(sums)
        it.optimizer.step()
    it.ends()


def passes_leave_in_step() -> None:
    """Those of a kind that there was not before, which another one may follow."""
    for ranks in ((0, 1), (0,), (1,)):
        it = Training(large())
        for step in range(6):
            it.optimizer.zero_grad()
            if step == 3:
                it.wrapped(torch.ones(1, 4))  # twice in this step
            it.backward(step)
            means = it.means()
            if step == 3 and dist.get_rank() in ranks:
                it.equal(means)
            it.optimizer.step()
        it.ends()


def zeros_are_zeros() -> None:
    """Also of a gradient that was this rank's own when it was zeroed."""
    it = Training(small())
    for step in range(4):
        it.backward(step)
        means = it.means()
        it.optimizer.step()
        if step == 2:
            it.equal(means)
        it.optimizer.zero_grad(set_to_none=False)
        if step:
            assert not any(one.grad.any() for one in it.weights)
    it.ends()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.never = (nn.Linear(4, 2) for _ in range(3))
        self.uses: Tuple[str, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in self.uses)


def some_are_absent() -> None:
    """Those that all ranks lack stay None. Where another one has it, nobody knows what the script
    has left out."""
    it = Training(Branches())
    for step in range(9):
        it.optimizer.zero_grad()
        uses: Tuple[str, ...] = ("first", "second") if step < 5 else ("first",)
        if step == 8 and dist.get_rank():
            uses = ("first", "second")
        it.wrapped.module.uses = uses
        it.backward(step)
        means = it.means()
        lacks = step == 8 and not dist.get_rank()
        if step in (3, 6, 7):
            for one, mean in zip(it.weights, means):
                assert (one.grad is None) == (not mean.any()), step
                assert one.grad is None or torch.equal(one.grad, mean)
        it.optimizer.step()
        if lacks:
            refused("has a gradient on another worker", it.weights[0].grad.norm)
        elif step > 3:
            assert torch.equal(it.weights[0].grad, means[0])
    it.ends()


def changes_have_workers_update() -> None:
    """Servers have updated, and know the states before. What changes no bit is none; after step it
    can't count."""
    changes: List[Callable[[Training], Any]] = [
        lambda it: it.weights[1].grad.mul_(0.5),
        lambda it: it.weights[1].grad.data.clamp_(-1e-4, 1e-4),
        lambda it: setattr(it.weights[1], "grad", it.weights[1].grad * 2),
        lambda it: nn.utils.clip_grad_norm_(it.weights, 1e-3),
        lambda it: nn.utils.clip_grad_norm_(it.weights[:1], 1e-3),
        lambda it: nn.utils.clip_grad_value_(it.weights, 1e-4),
    ]
    for change in changes:
        it = Training(small())
        for step in range(6):
            it.optimizer.zero_grad()
            it.backward(step)
            if step == 3:
                change(it)
            it.optimizer.step()
        assert it.optimizer.updates == "workers"
    it = Training(large())
    for step in range(6):
        it.optimizer.zero_grad()
        it.backward(step)
        means = it.means()
        if step > 2:
            norm = nn.utils.clip_grad_norm_(it.weights, 1e3)
            expected = torch.stack([mean.norm() for mean in means]).norm()
            torch.testing.assert_close(norm, expected)
            it.weights[0].grad.mul_(1.0)
            it.equal(means)
        it.optimizer.step()
        if step > 2:
            it.weights[0].grad.mul_(3)
            assert torch.equal(it.weights[0].grad, means[0] * 3)
    it.ends()


def clipped_steps_are_read() -> None:
    """Before the call, after it and after step: as torch clips the mean."""
    every, first, second = (0, 1), (0,), (1,)
    for when, ranks in (
        ("before", every), ("before", first), ("after", second), ("last", first), ("all", every),
    ):  # fmt: skip
        it = Training(large())
        for step in range(6):
            it.optimizer.zero_grad()
            it.backward(step)
            means = it.means()
            max_norm = 0.01 if step != 3 else 1e3
            reads = step > 1 and dist.get_rank() in ranks
            if reads and when in ("before", "all"):
                it.equal(means)
            nn.utils.clip_grad_norm_(it.weights, max_norm)
            norm = torch.stack([mean.norm() for mean in means]).norm()
            clipped = [mean * (max_norm / (norm + 1e-6)).clamp(max=1) for mean in means]
            if reads and when in ("after", "all"):
                near(it, clipped)
            it.optimizer.step()
            if reads and when in ("last", "all"):
                near(it, clipped)
        it.ends()


def near(it: Training, means: Grads) -> None:
    for one, mean in zip(it.weights, means):
        torch.testing.assert_close(one.grad, mean, equal_nan=True)


def scaled_steps_are_read() -> None:
    """Before unscale_, after it, after clipping and after step; also where a step overflows."""
    for unscales, clips, when in itertools.product(
        (True, False), (True, False), ("scaled", "unscaled", "last", "all")
    ):
        if clips and not unscales:
            continue
        it, scaler = Training(small()), torch.amp.GradScaler("cpu", 2.0**8)
        for step in range(7):
            it.optimizer.zero_grad()
            scale = scaler.get_scale()
            it.backward(step, scaler.scale(torch.ones(())) * (float("inf") if step == 4 else 1))
            means = it.means()
            if step > 1 and when in ("scaled", "all"):
                near(it, means)
            means = [mean / scale for mean in means]
            if unscales:
                scaler.unscale_(it.optimizer)
                if step > 1 and when in ("unscaled", "all"):
                    near(it, means)
            if clips:
                nn.utils.clip_grad_norm_(it.weights, 0.01)
                norm = torch.stack([mean.norm() for mean in means]).norm()
                means = [mean * (0.01 / (norm + 1e-6)).clamp(max=1) for mean in means]
            scaler.step(it.optimizer)
            scaler.update()
            if step > 1 and when in ("last", "all"):
                near(it, means)
        it.ends()


def half_precision_is_read() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        it = Training(large().to(dtype))
        for step in range(5):
            it.optimizer.zero_grad()
            it.backward(step)
            means = it.means()
            if step == 2:
                it.equal(means)
            it.optimizer.step()
            if step > 2:
                it.equal(means)
        it.ends()


def whole_tensors_are_read() -> None:
    """Of an optimizer that updates these."""
    it = Training(large())
    matrices = [one for one in it.weights if one.dim() == 2]
    for one in it.weights:
        one.requires_grad_(one.dim() == 2)
    made: Any = torch.optim.Adafactor(matrices, lr=0.01)
    it.optimizer = made
    for step in range(5):
        made.zero_grad()
        it.backward(step)
        means = it.means()
        reads = [(one, mean) for one, mean in zip(it.weights, means) if one.dim() == 2]
        if step == 2:
            assert all(torch.equal(one.grad, mean) for one, mean in reads)
        made.step()
        if step > 2:
            assert all(torch.equal(one.grad, mean) for one, mean in reads)
    it.ends()


def older_ones_are_refused() -> None:
    """Servers keep those of the last step."""
    it = Training(small())
    for step in range(3):
        it.optimizer.zero_grad()
        it.backward(step)
        it.optimizer.step()
        if step == 1:
            older = it.weights[0].grad
    refused("earlier step", older.norm)
    it.optimizer.zero_grad()
    it.ends()


def what_has_no_mean_is_refused() -> None:
    it = Training(small())
    for step in range(3):
        it.optimizer.zero_grad()
        it.backward(step)
        it.optimizer.step()
        if step:
            refused("remembers nothing", it.weights[0].grad.norm)
            refused(ONLY, it.weights[0].grad.norm)


def a_clipped_one_that_stays_is_refused() -> None:
    """A pass is to add to its mean."""
    it = Training(small())
    for step in range(2):
        it.optimizer.zero_grad()
        it.backward(step)
        nn.utils.clip_grad_norm_(it.weights, 0.1)
        it.optimizer.step()
    refused("was clipped, or the script uses it for the first time", it.backward, 2)


def sparse_ones_are_refused() -> None:
    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)))
    made: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        made.zero_grad()
        model(torch.tensor([step, 1 + dist.get_rank()])).square().mean().backward()
        made.step()
        if step:
            refused("sparse", model.module[0].weight.grad.coalesce)
            assert model.module[1].weight.grad.norm() > 0
    assert made.updates == "servers"


CHECKS: List[Callable[[], None]] = [
    read_each_third_step,
    uses_of_all_kinds,
    passes_add_up,
    passes_leave_in_step,
    zeros_are_zeros,
    some_are_absent,
    changes_have_workers_update,
    clipped_steps_are_read,
    scaled_steps_are_read,
    half_precision_is_read,
    whole_tensors_are_read,
    older_ones_are_refused,
    sparse_ones_are_refused,
]
BY_THEMSELVES = [what_has_no_mean_is_refused, a_clipped_one_that_stays_is_refused]


def main() -> None:
    dist.init_process_group("gloo")
    for check in CHECKS if not sys.argv[1:] else [*CHECKS, *BY_THEMSELVES]:
        if check.__name__ in sys.argv[1:] or not sys.argv[1:]:
            check()
            sys.stdout.write(f"right: {check.__name__}\n")  # in one piece, beside the other rank's
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
