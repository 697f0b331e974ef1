"""Models in torch's DistributedDataParallel, which p3kv trains, beside twins that this process
trains by itself with all workers' batches. Argument: which check; by default all."""

import p3kv.torch.ddp  # noqa: I001
import copy
import gc
import sys
from contextlib import nullcontext
from typing import Any, Callable, List
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch_refusals import refused

WORKERS = 2
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def small(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed + dist.get_rank())  # rank 0's counts
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def same(model: nn.Module, twin: nn.Module) -> None:
    expected = twin.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            value, expected[name], msg=lambda text, name=name: f"{name}: {text}"
        )


def mean_of(twin: nn.Module, step: int, loss: Loss = loss_of) -> None:
    """The mean gradient of all workers."""
    for rank in range(WORKERS):
        (loss(twin, batch(step, rank)) / WORKERS).backward()


def both_pass(step: int, model: nn.Module, twin: nn.Module, *optimizers: Any) -> None:
    """A pass of the model, and of all workers' models by the twin, with new gradients."""
    for one in optimizers:
        one.zero_grad()
    loss_of(model, batch(step, dist.get_rank())).backward()
    mean_of(twin, step)


def a_wrapper_is_torch_s() -> None:
    model = DDP(small(), bucket_cap_mb=1, find_unused_parameters=True, static_graph=True)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert isinstance(model, nn.parallel.distributed.DistributedDataParallel)
    assert next(iter(model.state_dict())) == "module.0.weight"
    assert model.device_ids is None and model.process_group.size() == WORKERS
    assert not model._get_ddp_logging_data().get("can_set_static_graph")
    model.reducer.prepare_for_backward([])
    copied = copy.deepcopy(model)
    assert isinstance(copied, DDP)
    same(copied, model)
    around, inside = torch.compile(model, backend="eager"), torch.compile(small(), backend="eager")
    assert around.module is model.module and isinstance(DDP(inside).module, type(inside))

    class Own(DDP):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.extra = 1

    own = Own(small())
    assert isinstance(own, Own) and own.extra == 1 and not hasattr(own.reducer, "rebuild")
    try:
        DDP(nn.ReLU())
    except RuntimeError as error:
        assert "doesn't have any parameter that requires a gradient" in str(error)
    else:
        raise AssertionError("a model without parameters")


def optimizers_are_found() -> None:
    """Made before the model is wrapped, and after; with a schedule and hooks; two of one model."""
    for order in ("before", "after", "two"):
        model = small()
        made: List[Any] = []
        if order == "before":
            made.append(sgd(model))
        wrapped = DDP(model)
        twin = copy.deepcopy(wrapped.module)
        if order == "after":
            made.append(sgd(wrapped))
        if order == "two":
            made += [sgd(wrapped.module[0]), torch.optim.AdamW(wrapped.module[2].parameters())]
            alone: List[Any] = [sgd(twin[0]), torch.optim.AdamW(twin[2].parameters())]
        else:
            alone = [sgd(twin)]
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (*made, *alone)]
        for step in range(6):
            for one in (*made, *alone):
                one.zero_grad()
            loss_of(wrapped, batch(step, dist.get_rank())).backward()
            mean_of(twin, step)
            for one in (*made, *alone):
                one.step()
            for schedule in schedules:
                schedule.step()
        same(wrapped.module, twin)
        assert all(isinstance(one, p3kv.torch.Optimizer) for one in made)


def what_only_p3kv_has_is_there_before_the_first_pass() -> None:
    model = small()
    made = sgd(model)
    try:
        made.weigh(3)
    except AttributeError as error:
        assert "p3kv has it once a model with its parameters is in Dist" in str(error), error
    else:
        raise AssertionError("which model?")
    wrapped = DDP(model)
    assert made.sum(dist.get_rank() + 1) == 3 and made.num_workers == WORKERS
    twin = copy.deepcopy(model)
    alone = sgd(twin)
    for step in range(3):
        made.zero_grad()
        made.weigh(1 + 2 * dist.get_rank())
        loss_of(wrapped, batch(step, dist.get_rank())).backward()
        made.step()
        alone.zero_grad()
        for rank in range(WORKERS):
            (loss_of(twin, batch(step, rank)) * (1 + 2 * rank) / 4).backward()
        alone.step()
    same(model, twin)


def gradients_of_no_optimizer_are_means() -> None:
    """A script may use them, as where it clips by the norm of the whole model's gradients."""
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    made: List[Any] = [sgd(wrapped.module[2])]
    alone: List[Any] = [sgd(twin[2])]
    for step in range(8):
        if step == 4:
            made.append(torch.optim.Adam(wrapped.module[0].parameters()))
            alone.append(torch.optim.Adam(twin[0].parameters()))
        for one in (wrapped, twin):
            one.zero_grad()
        loss_of(wrapped, batch(step, dist.get_rank())).backward()
        mean_of(twin, step)
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.05) for one in (wrapped, twin)]
        torch.testing.assert_close(*norms)
        for one in (*made, *alone):
            one.step()
    same(wrapped.module, twin)
    assert [one.updates for one in made] == ["workers"] * 2


def models_are_wrapped_again() -> None:
    """For each fit, as by fastai: their optimizers go on, or the script steps by itself. The older
    wrapper is gone, or is called in turns with the newer one."""
    for keeps in (False, True):
        for has_optimizer in (True, False):
            module = small()
            wrapped = [DDP(module)]
            twin = copy.deepcopy(module)
            models = (module, twin)
            made = [torch.optim.Adam(one.parameters()) for one in models if has_optimizer]
            for step in range(9):
                if step in (3, 6):
                    wrapped = [*(wrapped if keeps else ()), DDP(module)]
                for one in models:
                    one.zero_grad()
                loss_of(wrapped[step % len(wrapped)], batch(step, dist.get_rank())).backward()
                mean_of(twin, step)
                for optimizer in made:
                    optimizer.step()
                for model in () if made else models:
                    with torch.no_grad():
                        for one in model.parameters():
                            one -= 0.1 * one.grad
            same(module, twin)
            assert not made or made[0].updates == "servers"


def passes_add_up_as_the_script_says() -> None:
    """By `no_sync`, around the forward pass as torch has it; by the attribute; and without."""
    for how in ("no_sync", "attribute", "neither"):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        for step in range(6):
            made.zero_grad()
            alone.zero_grad()
            for part in range(3):
                wrapped.require_backward_grad_sync = how != "attribute" or part == 2
                x = batch(10 * step + part, dist.get_rank())
                if how == "no_sync" and part < 2:
                    with wrapped.no_sync():
                        loss = loss_of(wrapped, x)
                    loss.backward()
                else:
                    loss_of(wrapped, x).backward()
                mean_of(twin, 10 * step + part)
            made.step()
            alone.step()
        same(wrapped.module, twin)


def losses_reach_other_models() -> None:
    """As a GAN's, whose critic makes several steps for each of its generator's."""
    for critics in (1, 3):
        pairs = []
        for build in (small, lambda: nn.Linear(2, 1)):
            wrapped = DDP(build())
            twin = copy.deepcopy(wrapped.module)
            pairs.append((wrapped, twin, sgd(wrapped), sgd(twin)))
        (maker, maker_twin, *maker_optimizers), (critic, critic_twin, *critic_optimizers) = pairs

        def of_critic(judge: nn.Module, generator: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return judge(generator(x).detach()).square().mean() - judge(x[:, :2]).mean()

        def of_critic_twin(judge: nn.Module, x: torch.Tensor, maker: Any = maker_twin) -> Any:
            return of_critic(judge, maker, x)

        def of_maker_twin(maker: nn.Module, x: torch.Tensor, judge: Any = critic_twin) -> Any:
            return judge(maker(x)).mean()

        for step in range(12):
            x = batch(step, dist.get_rank())
            for one in critic_optimizers:
                one.zero_grad()
            of_critic(critic, maker, x).backward()
            mean_of(critic_twin, step, of_critic_twin)
            for one in critic_optimizers:
                one.step()
            if step % critics:
                continue
            for one in maker_optimizers:
                one.zero_grad()
            critic(maker(x)).mean().backward()
            mean_of(maker_twin, step, of_maker_twin)
            for one in maker_optimizers:
                one.step()
        same(maker.module, maker_twin)
        same(critic.module, critic_twin)


def gradients_leave_during_backward() -> None:
    wrapped = DDP(small())
    made = sgd(wrapped)
    left = []
    for step in range(5):
        made.zero_grad()
        loss_of(wrapped, batch(step, dist.get_rank())).backward()
        left.append(made._passes.leaves)
        made.step()
    assert left == [True] * 5, left


class Shared(nn.Module):
    """One layer in two segments whose activations are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return self.out(x)


def gradients_in_parts_leave_when_they_are_complete() -> None:
    wrapped = DDP(Shared(), static_graph=True)
    twin = copy.deepcopy(wrapped.module)
    made, alone = sgd(wrapped), sgd(twin)
    for step in range(5):
        both_pass(step, wrapped, twin, made, alone)
        made.step()
        alone.step()
    same(wrapped.module, twin)


def epochs_are_uneven() -> None:
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    made, alone = sgd(wrapped), sgd(twin)
    for how in (wrapped.join, lambda: Join([wrapped])):
        with how():
            for step in range(5 - 2 * dist.get_rank()):
                made.zero_grad()
                loss_of(wrapped, batch(step, dist.get_rank())).backward()
                made.step()
        for step in range(5):
            alone.zero_grad()
            for rank in range(WORKERS):
                if step < 5 - 2 * rank:
                    (loss_of(twin, batch(step, rank)) / WORKERS).backward()
            alone.step()
    same(wrapped.module, twin)


def models_of_one_optimizer_have_uneven_epochs() -> None:
    halves = [nn.Linear(4, 8), nn.Linear(8, 2)]
    wrapped = [DDP(one) for one in halves]
    both, twin = nn.Sequential(*wrapped), nn.Sequential(*copy.deepcopy(halves))
    twin.load_state_dict(
        {name.replace("module.", ""): one for name, one in both.state_dict().items()}
    )
    made, alone = sgd(both), sgd(twin)
    with Join(wrapped):
        for step in range(4 - 2 * dist.get_rank()):
            made.zero_grad()
            loss_of(both, batch(step, dist.get_rank())).backward()
            made.step()
    for step in range(4):
        alone.zero_grad()
        for rank in range(WORKERS if step < 2 else 1):
            (loss_of(twin, batch(step, rank)) / WORKERS).backward()
        alone.step()
    same(nn.Sequential(*halves), twin)


def a_compiled_wrapper_trains() -> None:
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    compiled = torch.compile(wrapped, backend="aot_eager")
    made, alone = sgd(wrapped), sgd(twin)
    for step in range(4):
        made.zero_grad()
        alone.zero_grad()
        if step % 2:
            with wrapped.no_sync():
                loss_of(compiled, batch(10 + step, dist.get_rank())).backward()
            mean_of(twin, 10 + step)
        loss_of(compiled, batch(step, dist.get_rank())).backward()
        mean_of(twin, step)
        made.step()
        alone.step()
    same(wrapped.module, twin)


def buffers_are_rank_0_s_or_each_its_own() -> None:
    for broadcast in (True, False):
        wrapped = DDP(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), broadcast_buffers=broadcast
        )
        made = sgd(wrapped)
        for step in range(3):
            made.zero_grad()
            loss_of(wrapped, batch(step, dist.get_rank())).backward()
            made.step()
        mean = wrapped.module[1].running_mean
        for is_after_pass in (False, True):
            if is_after_pass:
                wrapped.eval()(batch(0, 0))
            others = [torch.empty_like(mean) for _ in range(WORKERS)]
            dist.all_gather(others, mean)
            assert torch.equal(*others) == (broadcast and is_after_pass)
        loss_of(wrapped, batch(3, dist.get_rank())).backward()
        made.step()
        if dist.get_rank() == 0:  # alone, before the others train something else
            with torch.no_grad():
                wrapped(batch(0, 0))
    own = small()
    own.register_buffer("noise", torch.randn(4))  # of the rank's own seed
    before = own.noise.clone()
    made = sgd(own)
    wrapped = DDP(own, broadcast_buffers=False)
    for step in range(3):
        made.zero_grad()
        loss_of(wrapped, batch(step, 0)).backward()
        made.step()
        with torch.no_grad():
            own[0].weight.mul_(0.9)  # workers update from then on
        assert torch.equal(own.noise, before), step
    assert made.updates == "workers"


def copies_of_weights_are_updated() -> None:
    """As in training by halves, whose optimizer has float32. At last an optimizer has the weights
    themselves."""
    for broadcast in (True, False):
        model = nn.Sequential(small(), nn.BatchNorm1d(2, affine=False))
        wrapped = DDP(model, broadcast_buffers=broadcast)
        twin = copy.deepcopy(model[0])
        if dist.get_rank() == 0:  # as who counts operations: no other rank is needed
            wrapped(batch(0, 0))
        copies = [one.detach().clone().requires_grad_() for one in model.parameters()]
        made, alone = torch.optim.Adam(copies, lr=0.1), torch.optim.Adam(twin.parameters(), lr=0.1)
        for step in range(4):
            wrapped.zero_grad()
            alone.zero_grad()
            for part in range(2):  # they add up
                wrapped(batch(step, dist.get_rank()))
                loss_of(model[0], batch(2 * step + part, dist.get_rank())).backward()
                mean_of(twin, 2 * step + part)
            for mine, weight, other in zip(copies, model.parameters(), twin.parameters()):
                torch.testing.assert_close(weight.grad, other.grad)
                mine.grad = weight.grad.clone()
            made.step()
            alone.step()
            with torch.no_grad():
                for mine, weight in zip(copies, model.parameters()):
                    weight.copy_(mine)
        same(model[0], twin)
        wrapped(batch(0, dist.get_rank()))
    made, alone = sgd(wrapped), sgd(twin)
    for step in range(4):
        made.zero_grad()
        alone.zero_grad()
        wrapped(batch(step, dist.get_rank()))
        loss_of(model[0], batch(step, dist.get_rank())).backward()
        mean_of(twin, step)
        made.step()
        alone.step()
    same(model[0], twin)
    assert made.updates == "servers"
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    loss_of(wrapped, batch(0, dist.get_rank())).backward()
    mean_of(twin, 0)
    sgd(wrapped).step()  # which is made later
    sgd(twin).step()
    same(wrapped.module, twin)


def gradients_are_used_before_a_step() -> None:
    """They are means then, from the first step on; a scaler and clipping need no other way."""

    def clipped(model: nn.Module, _: Any, __: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def dropped(model: nn.Module, _: Any, __: Any) -> None:
        [*model.parameters()][-1].grad = None

    def scaled(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def clipped_as_scaled(model: nn.Module, _: Any, __: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def none(*_: Any) -> None:
        pass

    for use, scales, way in (
        (clipped, False, "workers"),
        (dropped, False, "workers"),
        (clipped, True, "workers"),
        (scaled, True, "servers"),
        (clipped_as_scaled, True, "workers"),
        (clipped_as_scaled, False, "servers"),
        (none, True, "servers"),
        (none, False, "servers"),
    ):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        mine, its = (
            torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales) for _ in range(2)
        )
        for step in range(6):

            def loss(
                model: nn.Module,
                x: torch.Tensor,
                scaler: torch.amp.GradScaler = mine,
                overflows: bool = scales and step == 3,
            ) -> torch.Tensor:
                found = scaler.scale(loss_of(model, x))
                return found * float("inf") if overflows and torch.equal(x, batch(3, 1)) else found

            made.zero_grad()
            alone.zero_grad()
            loss(wrapped, batch(step, dist.get_rank())).backward()
            its.scale(torch.zeros(()))
            mean_of(twin, step, loss)
            for model, scaler, optimizer in ((wrapped, mine, made), (twin, its, alone)):
                use(model, scaler, optimizer)
                scaler.step(optimizer)
            mine.update()
            its.update()
            assert mine.get_scale() == its.get_scale()
        same(wrapped.module, twin)
        assert made.updates == way, (use, scales)


def gradients_are_used_from_a_later_step_on() -> None:
    """They become the mean then: those that have left, those that leave in `step`, and after it.
    What reads no number changes none."""

    def at_once(wrapped: nn.Module) -> torch.Tensor:
        return loss_of(wrapped, batch(0, dist.get_rank()))

    def in_step(wrapped: nn.Module) -> torch.Tensor:
        """Another pass may follow the first of its kind."""
        return at_once(wrapped) + at_once(wrapped)

    none: List[Callable[[nn.Module], Any]] = [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: [one.grad.zero_() for one in model.parameters()],
        lambda model: [setattr(one, "grad", None) for one in model.parameters()],
        lambda model: model.cpu().zero_grad(),
    ]
    for loss, sets in ((at_once, none[:1]), (in_step, none[1:2]), (at_once, none), (in_step, none)):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        seen: List[float] = []
        wrapped.module[0].weight.register_post_accumulate_grad_hook(
            lambda one, seen=seen: seen.append(one.grad.norm().item())  # as torch's: not the mean
        )
        for step in range(12):
            alone.zero_grad()
            sets[step % len(sets)](wrapped) if step else None
            (loss if step in (4, 8) else at_once)(wrapped).backward()
            weights = [one for one in wrapped.parameters() if one.grad.shape == one.shape]
            assert len(weights) == 4 and weights[0].grad.dtype is torch.float32
            mean = [loss_of(twin, batch(0, rank)) / WORKERS for rank in range(WORKERS)]
            (sum(mean) * (2 if loss is in_step and step in (4, 8) else 1)).backward()
            expected = [*twin.parameters()][step // 4].grad
            if step in (4, 8):
                torch.testing.assert_close(weights[step // 4].grad, expected)
            made.step()
            alone.step()
            if step in (0, 4, 6):
                torch.testing.assert_close(weights[step // 4].grad, expected)
            assert len(seen) >= step + 1
        gone = ref(weights[0].grad)
        del weights
        made.zero_grad()
        assert gone() is None
        same(wrapped.module, twin)
        assert made.updates == "servers"


def unscaled_gradients_are_used_in_the_first_step() -> None:
    """As clipped by value: of a scaler whose first scale overflows, and of one that does not."""
    for scale in (2.0**127, 2.0**8):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        scaler, own = (torch.amp.GradScaler("cpu", scale, growth_interval=3) for _ in range(2))

        def scaled(model: nn.Module, x: torch.Tensor, own: Any = own) -> torch.Tensor:
            return own.scale(1e3 * loss_of(model, x))

        for step in range(8):
            made.zero_grad()
            alone.zero_grad()
            scaled(wrapped, batch(step, dist.get_rank()), scaler).backward()
            mean_of(twin, step, scaled)
            for its, one, model in ((scaler, made, wrapped), (own, alone, twin)):
                its.unscale_(one)
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                its.step(one)
                its.update()
            assert scaler.get_scale() == own.get_scale()
        same(wrapped.module, twin)
        assert made.updates == "workers"


def a_frozen_weight_keeps_a_gradient_of_zeros() -> None:
    """And so the optimizer goes on with its moments."""
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    made, alone = (torch.optim.Adam(one.parameters()) for one in (wrapped, twin))
    for step in range(9):
        for model in (wrapped.module, twin):
            model[0].requires_grad_(step < 3 or step > 6)
        made.zero_grad(set_to_none=False)
        alone.zero_grad(set_to_none=False)
        loss_of(wrapped, batch(step, dist.get_rank())).backward()
        mean_of(twin, step)
        made.step()
        alone.step()
    same(wrapped.module, twin)
    assert made.updates == "servers"


def models_are_frozen_but_in_their_own_steps() -> None:
    """From before the first call on, also when the optimizer steps; called in `no_sync` while they
    are, and in the first of two passes. As StyleGAN2-ADA does, which writes to gradients by
    `out=`, from the first step on."""

    def called(model: nn.Module, x: torch.Tensor, syncs: bool) -> torch.Tensor:
        with nullcontext() if syncs or not isinstance(model, DDP) else model.no_sync():
            return model(x)

    def maker_s(maker: nn.Module, critic: nn.Module, x: torch.Tensor) -> None:
        (-called(critic, called(maker, x, True), False)).mean().backward()

    def critic_s(maker: nn.Module, critic: nn.Module, x: torch.Tensor) -> None:
        called(critic, called(maker, x, False), False).mean().backward()
        called(critic, x + 1, True).square().mean().backward()

    def cleaned(gradient: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(gradient, posinf=1e5, neginf=-1e5, out=gradient)

    for cleans in (True, False):
        wrapped = [DDP(one) for one in (nn.Linear(4, 4), small())]
        for one in wrapped:
            one.requires_grad_(False)
        twins = [copy.deepcopy(one.module) for one in wrapped]
        made, alone = ([sgd(one) for one in models] for models in (wrapped, twins))
        for step in range(5):
            for at, passes in enumerate((maker_s, critic_s)):
                for models, optimizers in ((wrapped, made), (twins, alone)):
                    optimizers[at].zero_grad()
                    models[at].requires_grad_(True)
                    if models is wrapped:
                        passes(*models, batch(step, dist.get_rank()))
                    else:
                        for rank in range(WORKERS):
                            passes(*models, batch(step, rank))
                        for one in models[at].parameters():
                            one.grad /= WORKERS
                    models[at].requires_grad_(False)
                    for one in models[at].parameters() if cleans else ():
                        cleaned(one.grad)
                    optimizers[at].step()
            for model, twin in zip(wrapped, twins):
                same(model.module, twin)
        assert [one.updates for one in made] == ["workers" if cleans else "servers"] * 2


def weights_are_written_between_steps() -> None:
    """Loaded once, with the optimizer's states and without; clamped after each step, as a
    Wasserstein GAN's critic; put aside for a while, as for an average of weights."""

    def loaded(model: nn.Module, made: Any, step: int, kept: List[Any]) -> None:
        if step == 2:
            kept[:] = copy.deepcopy([model.state_dict(), made.state_dict()])
        if step == 5:
            model.load_state_dict(kept[0])

    def loaded_with_states(model: nn.Module, made: Any, step: int, kept: List[Any]) -> None:
        loaded(model, made, step, kept)
        if step == 5:
            made.load_state_dict(kept[1])

    def clamped(model: nn.Module, _: Any, __: int, ___: Any) -> None:
        for one in model.parameters():
            one.data.clamp_(-0.2, 0.2)

    def scaled(model: nn.Module, _: Any, step: int, __: Any) -> None:
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(0.9 if step > 1 else 1)

    def put_aside(model: nn.Module, _: Any, step: int, kept: List[Any]) -> None:
        kept[:] = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one, value in zip(model.parameters(), kept):
                one.zero_()
                one.copy_(value)

    for dtype in (torch.float32, torch.bfloat16):
        for write, way in (
            (loaded, "workers"),
            (loaded_with_states, "workers"),
            (clamped, "workers"),
            (scaled, "workers"),
            (put_aside, "servers"),
        ):
            wrapped = DDP(small().to(dtype))
            twin = copy.deepcopy(wrapped.module)
            made, alone = (torch.optim.AdamW(one.parameters(), lr=0.05) for one in (wrapped, twin))
            kept: List[List[Any]] = [[], []]
            for step in range(8):
                made.zero_grad()
                alone.zero_grad()

                def loss(model: nn.Module, x: torch.Tensor, dtype: Any = dtype) -> torch.Tensor:
                    return loss_of(model, x.to(dtype))

                loss(wrapped, batch(step, dist.get_rank())).backward()
                mean_of(twin, step, loss)
                made.step()
                alone.step()
                write(wrapped.module, made, step, kept[0])
                write(twin, alone, step, kept[1])
            if dtype is torch.float32:  # servers keep weights in it
                same(wrapped.module, twin)
            ranks = [torch.empty_like(wrapped.module[0].weight) for _ in range(WORKERS)]
            dist.all_gather(ranks, wrapped.module[0].weight.detach())
            assert torch.equal(*ranks)
            assert made.updates == way, (write, made.updates)


def weights_are_written_around_backward() -> None:
    """In forward, as a learnt temperature is clamped or EDM2 normalizes, before `backward` and
    after it, as weight decay by hand, and after clipping; from the first step on or later. Each
    rank's running statistics are its own meanwhile."""

    def write(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    def write_data(model: nn.Module) -> None:
        model[0].weight.data = model[0].weight.data * 0.9

    class Writing(nn.Sequential):
        writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.writes:
                write(self)
            return super().forward(x)

    def made(moment: str) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        parts = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        return (Writing if moment == "forward" else nn.Sequential)(*parts)

    for moment, first, by in (
        ("forward", 0, write), ("forward", 3, write), ("before", 0, write_data),
        ("before", 4, write), ("after", 0, write), ("after", 0, write_data),
        ("after", 4, write), ("clipped", 0, write), ("clipped", 1, write_data),
    ):  # fmt: skip
        wrapped = DDP(made(moment))
        twins = [copy.deepcopy(wrapped.module) for _ in range(WORKERS)]
        own = twins[dist.get_rank()]
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
        alone = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in twins]
        for step in range(6):
            writes = step >= first
            for rank, (model, its) in enumerate(zip([wrapped, *twins], [optimizer, *alone]), -1):
                its.zero_grad()
                inner = model.module if model is wrapped else model
                inner.writes = writes
                loss = loss_of(model, batch(step, dist.get_rank() if rank < 0 else rank))
                if writes and moment == "before":
                    by(inner)
                loss.backward()
            for grads in zip(*(one.parameters() for one in twins)):
                mean = torch.stack([one.grad for one in grads]).mean(0)
                for one in grads:
                    one.grad = mean.clone()
            for model, its in zip([wrapped.module, *twins], [optimizer, *alone]):
                if moment == "clipped":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                if writes and moment in ("after", "clipped"):
                    by(model)
                its.step()
            same(wrapped.module, own)
            for one in twins[1:]:  # rank 0's buffers, in the next forward pass
                one[1].load_state_dict({**one[1].state_dict(), **dict(twins[0][1].named_buffers())})
        assert optimizer.updates == "workers", (moment, first)


def steps_are_left_out_that_are_clipped() -> None:
    """As where a norm is not finite; gradients are zeroed then, or the next pass adds to them."""
    for zeroes in (True, False):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        for step in range(8):
            if zeroes or step != 6:
                made.zero_grad()
                alone.zero_grad()
            loss_of(wrapped, batch(step, dist.get_rank())).backward()
            mean_of(twin, step)
            norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (wrapped, twin)]
            torch.testing.assert_close(*norms)
            if step != 5:
                made.step()
                alone.step()
            assert made.updates == ("workers" if step > 5 else "servers"), step
        same(wrapped.module, twin)


def gradients_stay_after_a_clipped_step() -> None:
    """The next pass adds to the clipped mean."""
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    made, alone = sgd(wrapped), sgd(twin)
    for step in range(8):
        loss_of(wrapped, batch(step, dist.get_rank())).backward()
        mean_of(twin, step)
        for model in (wrapped, twin):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
        alone.step()
        same(wrapped.module, twin)
        if step % 3 == 2:
            made.zero_grad()
            alone.zero_grad()
    assert made.updates == "servers"


def steps_are_each_worker_s_own() -> None:
    """All passes of a step are in no_sync, and weights are averaged by hand; from the first step
    on, or later, with clipping and without."""
    for first, clips in ((0, False), (0, True), (3, False), (3, True)):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        for step in range(8):
            made.zero_grad()
            alone.zero_grad()
            with wrapped.no_sync() if step >= first else nullcontext():
                loss_of(wrapped, batch(step, dist.get_rank())).backward()
            if step >= first:
                loss_of(twin, batch(step, dist.get_rank())).backward()
            else:
                mean_of(twin, step)
            if clips:
                for model in (wrapped, twin):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            made.step()
            alone.step()
            same(wrapped.module, twin)
            for one in [*wrapped.parameters(), *twin.parameters()] if step % 4 == 3 else ():
                dist.all_reduce(one.data)
                one.data /= WORKERS
        assert made.updates == "workers", (first, clips)


class Centred(nn.Module):
    """Its output depends on a buffer, which each pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        with torch.no_grad():
            self.centre = self.centre * 0.5 + found.mean(0)
        return found - self.centre


def buffers_are_shared_in_each_forward_pass() -> None:
    """Also in the second one of a step, and of a model that nobody trains."""
    rank = dist.get_rank()
    student, teacher = DDP(Centred()), DDP(Centred())
    teacher.module.requires_grad_(False)
    twins = [copy.deepcopy((student.module, teacher.module)) for _ in range(WORKERS)]
    made = torch.optim.SGD(student.parameters(), lr=0.1)
    alone = torch.optim.SGD(twins[0][0].parameters(), lr=0.1)

    def shared() -> None:
        for first, one in zip(twins[0], twins[1]):
            one.load_state_dict(first.state_dict())

    for step in range(4):
        made.zero_grad()
        alone.zero_grad()
        for part in (0, 10):
            shared()
            expected = []
            for its, (pupil, master) in enumerate(twins):
                x = batch(step + part, its)
                expected.append((pupil(x) - master(x)).square().mean())
            sum(expected).div(WORKERS).backward()
            for mine, one in zip(twins[0][0].parameters(), twins[1][0].parameters()):
                mine.grad += one.grad
                one.grad = None
            x = batch(step + part, rank)
            loss = (student(x) - teacher(x)).square().mean()
            torch.testing.assert_close(loss, expected[rank])
            loss.backward()
        made.step()
        alone.step()
        torch.testing.assert_close(student.module.centre, twins[rank][0].centre)
        torch.testing.assert_close(teacher.module.centre, twins[rank][1].centre)


def parameters_come_into_an_optimizer_later() -> None:
    """Where they were frozen, servers go on to update; where they had gradients, workers do."""
    for freezes in (False, True):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped.module[0]), sgd(twin[0])
        both = ((made, wrapped.module[2]), (alone, twin[2]))
        for _, layer in both:
            layer.requires_grad_(not freezes)
        for step in range(6):
            if step == 3:
                for optimizer, layer in both:
                    layer.requires_grad_(True)
                    optimizer.add_param_group({"params": layer.parameters(), "lr": 0.2})
            wrapped.zero_grad()
            twin.zero_grad()
            loss_of(wrapped, batch(step, dist.get_rank())).backward()
            mean_of(twin, step)
            made.step()
            alone.step()
        same(wrapped.module, twin)
        assert made.updates == ("servers" if freezes else "workers")


def steps_take_closures() -> None:
    """With the forward pass in them, as Lightning's; a schedule is made before, others clip. In
    some workers update from then on."""

    def clip(how: str, model: nn.Module) -> None:
        if how == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if how == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)

    for clips in ("", "norm", "value", "writes"):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (made, alone)]
        for step in range(6):

            def forward_and_back(
                step: int = step, wrapped: Any = wrapped, made: Any = made, clips: str = clips
            ) -> Any:
                loss = loss_of(wrapped, batch(step, dist.get_rank()))
                made.zero_grad()
                loss.backward()
                clip(clips, wrapped)
                return loss

            assert made.step(closure=forward_and_back).grad_fn is not None
            alone.zero_grad()
            mean_of(twin, step)
            clip(clips, twin)
            alone.step()
            if clips == "writes" and step == 2:
                for model in (wrapped, twin):
                    with torch.no_grad():
                        next(iter(model.parameters())).mul_(0.5)
            for one in schedules:
                one.step()
        same(wrapped.module, twin)
        assert made.updates == ("workers" if clips in ("value", "writes") else "servers")


def rates_change_between_backward_and_step() -> None:
    """Before or after the step is clipped, whose norm is read or not; or a gradient is left out."""
    for clips, reads, leaves_out in (
        (False, False, False), (True, False, False), (True, True, False), (True, False, True),
    ):  # fmt: skip
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        for step in range(6):
            both_pass(step, wrapped, twin, made, alone)
            norms = [
                nn.utils.clip_grad_norm_(one.parameters(), 0.05) for one in (wrapped, twin) if clips
            ]
            if reads:
                torch.testing.assert_close(*norms)
            for one in (made, alone):
                if leaves_out:
                    one.param_groups[0]["params"][-1].grad = None
                else:
                    one.param_groups[0]["lr"] = 0.1 if not step and reads else 0.02 * (step + 1)
                one.step()
            if clips:
                torch.testing.assert_close(*norms)
        same(wrapped.module, twin)
        assert made.updates == "workers"


def rates_change_there_later_than_in_the_first_step() -> None:
    """By a schedule whose first rate is equal to the optimizer's; or by one of torch's that steps
    there, and changes nothing at first. One that changes them elsewhere does not count."""
    for how in ("by hand", "StepLR", "after step"):
        wrapped = DDP(small())
        twin = copy.deepcopy(wrapped.module)
        made, alone = sgd(wrapped), sgd(twin)
        schedules = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in (made, alone)]
        for step in range(8):
            both_pass(step, wrapped, twin, made, alone)
            for one, schedule in zip((made, alone), schedules):
                if how == "by hand":
                    one.param_groups[0]["lr"] = 0.1 * (step + 1 if step < 4 else 8 - step)
                if how == "StepLR":
                    schedule.step()
                one.step()
                if how == "after step":
                    schedule.step()
        same(wrapped.module, twin)
        assert made.updates == ("servers" if how == "after step" else "workers")


def a_step_is_clipped_by_torch_s_function() -> None:
    """Also of a p3kv.torch.Optimizer without a wrapper; other parameters' gradients are torch's."""
    for wraps in (True, False):
        model = small()
        wrapped = DDP(model) if wraps else model
        made = sgd(wrapped)
        if not wraps:
            made = p3kv.torch.Optimizer(model, made)
        twin = copy.deepcopy(model)
        alone = sgd(twin)
        other = nn.Linear(4, 4)
        for step in range(5):
            both_pass(step, wrapped, twin, made, alone)
            found = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            made.step()
            alone.step()
            torch.testing.assert_close(found, expected)
            other(batch(step, 0)).sum().backward()
            nn.utils.clip_grad.clip_grad_norm_(other.parameters(), 1e-3)
            assert nn.utils.get_total_norm([other.weight.grad, other.bias.grad]) < 1.1e-3
        same(model, twin)


def each_worker_keeps_a_part_of_the_states() -> None:
    """torch's ZeroRedundancyOptimizer, with a scheduler, clipping and states that are gathered."""
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    made = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.05)
    alone = torch.optim.AdamW(twin.parameters(), lr=0.05)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (made, alone)]
    for step in range(6):
        both_pass(step, wrapped, twin, made, alone)
        for model in (wrapped, twin):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        made.step()
        alone.step()
        for one in schedules:
            one.step()
    same(wrapped.module, twin)
    assert made.updates == "workers"
    made.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert made.state_dict()["state"].keys() == alone.state_dict()["state"].keys()


def twice(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Twice the mean."""
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda sums: sums.value()[0] * 2 / WORKERS)


def what_needs_torch_s_reducer_torch_trains() -> None:
    """With the script's own hook, with PowerSGD's, which takes means of what is small, and in a
    process group of some ranks; beside a model that p3kv trains."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    class Own(nn.parallel.DistributedDataParallel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    alone = [dist.new_group([rank]) for rank in range(WORKERS)][dist.get_rank()]
    hooked, powered, apart, ours = (
        Own(small(3)),
        DDP(small()),
        DDP(small(7), process_group=alone),
        DDP(small(4)),
    )
    hooked.register_comm_hook(None, twice)
    powered.register_comm_hook(power.PowerSGDState(None), power.powerSGD_hook)
    assert type(hooked) is Own and type(powered) is type(apart) is Own.__base__
    models = hooked, powered, apart, ours
    twins = [copy.deepcopy(model.module) for model in models]
    optimizers = [sgd(one) for one in (*models, *twins)]
    for step in range(4):
        for one in optimizers:
            one.zero_grad()
        for model in models:
            loss_of(model, batch(step, dist.get_rank())).backward()
        mean_of(twins[0], step, lambda model, x: 2 * (model(x) / 2).square().mean())
        mean_of(twins[1], step)
        loss_of(twins[2], batch(step, dist.get_rank())).backward()
        mean_of(twins[3], step)
        for one in optimizers:
            one.step()
    for model, twin in zip(models, twins):
        same(model.module, twin)
    assert [hasattr(one, "updates") for one in optimizers] == [False] * 3 + [True] + [False] * 4


def what_is_joined_with_others_torch_trains() -> None:
    """Rank 1 has no third batch. Its part of the states needs the others' gradients then."""
    wrapped = DDP(small(), gradient_as_bucket_view=True)
    made = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.05)
    with Join([wrapped, made]):
        for step in range(3 - dist.get_rank()):
            made.zero_grad()
            loss_of(wrapped, batch(step, dist.get_rank())).backward()
            made.step()
    ranks = [torch.empty_like(wrapped.module[0].weight) for _ in range(WORKERS)]
    dist.all_gather(ranks, wrapped.module[0].weight.detach())
    assert torch.equal(*ranks)
    assert type(wrapped) is nn.parallel.DistributedDataParallel
    assert not hasattr(made, "updates")


def gradients_leave_when_they_are_ready_also_those_that_torch_would_delay() -> None:
    module = small()
    delayed, last = [*module.named_parameters()][1:], module[0].weight
    model = DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=last)
    twin = copy.deepcopy(module)
    made, alone = sgd(model), sgd(twin)
    for step in range(3):
        both_pass(step, model, twin, made, alone)
        made.step()
        alone.step()
    same(module, twin)
    assert made.updates == "servers"


def what_it_can_t_train_is_refused() -> None:
    first = DDP(small())
    made = sgd(first)
    loss_of(first, batch(0, dist.get_rank())).backward()
    made.step()
    from torch.distributed.fsdp import fully_shard

    sharded = small()
    fully_shard(sharded)
    refused("a parameter is a DTensor", sgd, sharded)
    refused("a parameter is a DTensor", DDP, sharded)
    from torch.distributed.fsdp import FullyShardedDataParallel

    refused(
        "a parameter is a FlatParameter",
        lambda: sgd(FullyShardedDataParallel(small(), device_id=torch.device("cpu"))),
    )
    refused("is inside of another one", lambda: DDP(DDP(small())))
    refused("Do it before the model is first called", first.register_comm_hook, None, twice)
    late = DDP(small())
    made = sgd(late)
    loss_of(late, batch(0, 0)).backward()
    nn.utils.clip_grad_norm_(late.parameters(), 0.05)
    del late, made
    gc.collect()  # it does not make the step that servers hold
    mixed = small()
    by_hand = p3kv.torch.Optimizer(mixed, sgd(mixed))
    wrapped = DDP(mixed)
    refused("makes a p3kv.torch.Optimizer, too", p3kv.torch.Optimizer, wrapped, sgd(mixed))
    refused("makes a p3kv.torch.Optimizer, too", wrapped, batch(0, 0))
    by_hand.wait()


def a_hook_rounds_gradients() -> None:
    """Before any other check: a job keeps its codecs."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = DDP(small())
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    twin = copy.deepcopy(wrapped.module)
    made, alone = sgd(wrapped), sgd(twin)
    for step in range(3):
        made.zero_grad()
        loss_of(wrapped, batch(step, dist.get_rank())).backward()
        made.step()
        sums = [torch.zeros_like(one) for one in twin.parameters()]
        for rank in range(WORKERS):
            alone.zero_grad()
            loss_of(twin, batch(step, rank)).backward()
            for total, one in zip(sums, twin.parameters()):
                total += one.grad.bfloat16().float()
        for total, one in zip(sums, twin.parameters()):
            one.grad = total / WORKERS
        alone.step()
    same(wrapped.module, twin)


def workers_update_by_the_setting() -> None:
    """In a job of its own."""
    wrapped = DDP(small())
    twin = copy.deepcopy(wrapped.module)
    made, alone = sgd(wrapped), sgd(twin)
    for step in range(6):
        both_pass(step, wrapped, twin, made, alone)
        if step == 3:
            for one, other in zip(wrapped.parameters(), twin.parameters()):
                torch.testing.assert_close(one.grad, other.grad)
        if step > 3:
            for model in (wrapped, twin):
                nn.utils.clip_grad_value_(model.parameters(), 0.001)
        made.step()
        alone.step()
    same(wrapped.module, twin)
    assert made.updates == "workers"


CHECKS: List[Callable[[], None]] = [
    a_wrapper_is_torch_s,
    optimizers_are_found,
    what_only_p3kv_has_is_there_before_the_first_pass,
    gradients_of_no_optimizer_are_means,
    models_are_wrapped_again,
    passes_add_up_as_the_script_says,
    losses_reach_other_models,
    gradients_leave_during_backward,
    gradients_in_parts_leave_when_they_are_complete,
    epochs_are_uneven,
    models_of_one_optimizer_have_uneven_epochs,
    a_compiled_wrapper_trains,
    buffers_are_rank_0_s_or_each_its_own,
    copies_of_weights_are_updated,
    gradients_are_used_before_a_step,
    unscaled_gradients_are_used_in_the_first_step,
    a_frozen_weight_keeps_a_gradient_of_zeros,
    models_are_frozen_but_in_their_own_steps,
    weights_are_written_between_steps,
    weights_are_written_around_backward,
    steps_are_left_out_that_are_clipped,
    gradients_stay_after_a_clipped_step,
    steps_are_each_worker_s_own,
    buffers_are_shared_in_each_forward_pass,
    parameters_come_into_an_optimizer_later,
    steps_take_closures,
    rates_change_between_backward_and_step,
    rates_change_there_later_than_in_the_first_step,
    a_step_is_clipped_by_torch_s_function,
    each_worker_keeps_a_part_of_the_states,
    what_needs_torch_s_reducer_torch_trains,
    what_is_joined_with_others_torch_trains,
    gradients_leave_when_they_are_ready_also_those_that_torch_would_delay,
    what_it_can_t_train_is_refused,
    gradients_are_used_from_a_later_step_on,
]
BY_THEMSELVES = [a_hook_rounds_gradients, workers_update_by_the_setting]


def main() -> None:
    dist.init_process_group("gloo")
    for check in CHECKS if not sys.argv[1:] else [*CHECKS, *BY_THEMSELVES]:
        if sys.argv[1:] in ([], [check.__name__]):
            check()
            sys.stdout.write(f"right: {check.__name__}\n")  # in one piece, beside the other rank's
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
