"""Uses gradients between backward and step, and after it: a change is refused in words that say
what was seen, and whoever only reads trains on."""

import p3kv.torch  # noqa: I001
import copy
import time
from typing import Any, Callable, Dict, Optional

import numpy as np
import torch
from p3kv.errors import P3Error
from torch import nn

ONES = torch.ones(1, 4)
WIDE = 1024


def trained(model: nn.Module) -> p3kv.torch.Optimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return p3kv.torch.Optimizer(model, inner, updates="servers")


def scaled(gradient: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(1), torch.full((1,), 0.5)
    )


def doubled(gradient: torch.Tensor) -> None:
    gradient.data.mul_(2)


def of_another_tensor(p: nn.Parameter) -> None:
    p.grad = p.grad * 2


def none(p: nn.Parameter) -> None:
    p.grad = None


CHANGES: Dict[str, Callable[[nn.Parameter], Any]] = {
    "through grad.data": lambda p: p.grad.data.clamp_(-0.05, 0.05),
    "through grad.data ": lambda p: p.grad.data[0].mul_(2),
    "through grad.numpy": lambda p: p.grad.numpy().fill(2),
    "through grad.numpy ": lambda p: p.grad.detach().view(-1).numpy().fill(2),
    "through grad.__array__": lambda p: np.multiply(p.grad, 2, out=np.asarray(p.grad)),
    "through grad.__dlpack__": lambda p: (
        np.from_dlpack(torch.from_dlpack(p.grad)).__class__ and torch.from_dlpack(p.grad).mul_(2)
    ),
    "through grad.untyped_storage": lambda p: p.grad.untyped_storage().fill_(1),
    "through grad.data  ": lambda p: setattr(p.grad, "data", p.grad.detach() * 2) or p.grad.data,
    "through grad._amp_foreach": lambda p: scaled(p.grad),
    "to in place": lambda p: p.grad.mul_(2),
    "to in place ": lambda p: p.grad.detach().T.add_(1),
    "to in place  ": lambda p: nn.utils.clip_grads_with_norm_([p], 1e-3, torch.tensor(9.0)),
    "to in place after backward had computed it and before opt.step(), when it had left for the "
    "servers: call zero_grad after": lambda p: p.grad.zero_(),
    "was replaced by another tensor": of_another_tensor,
    "was set to None": none,
}
READS: Dict[str, Callable[[nn.Parameter], Any]] = {
    "a norm": lambda p: p.grad.data.norm(2),
    "views": lambda p: [row.detach().abs().max().item() for row in p.grad],
    "numpy": lambda p: p.grad.numpy().sum(),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "reduced": lambda p: copy.copy(p.grad),
    "repr": lambda p: repr(p.grad).index("tensor("),
    "foreach": lambda p: torch._foreach_norm([p.grad, p.grad.data]),
    "a parameter": lambda p: nn.Parameter(p.grad),
    "copies": lambda p: torch.zeros(3, 4).copy_(p.grad).clamp_(0, 0),
    "the same values": lambda p: setattr(p, "grad", p.grad.clone()),
    "written back": lambda p: (p.grad.numpy().__imul__(2), p.grad.numpy().__itruediv__(2)),
    "type": lambda p: isinstance(p.grad, torch.Tensor) and p.grad.type(),
}


def refuse_changes(steps_before: int) -> None:
    """`steps_before`: in the first step, gradients have not left yet."""
    for words, change in CHANGES.items():
        model = nn.Linear(4, 3, bias=False)
        optimizer = trained(model)
        for _ in range(steps_before):
            step(model, optimizer)
        model(ONES).sum().backward()
        change(model.weight)
        check_refusal(words.rstrip(), optimizer.step)


def step(model: nn.Module, optimizer: p3kv.torch.Optimizer) -> None:
    model(ONES).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def let_others_read() -> None:
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = trained(model)
    for number, (name, read) in enumerate(READS.items(), 1):
        model(ONES).sum().backward()
        read(model.weight)
        optimizer.step()
        optimizer.wait()
        assert type(model.weight.grad) is torch.Tensor, name
        optimizer.zero_grad()
        torch.testing.assert_close(model.weight.detach(), torch.full((3, 4), -0.1 * number))


def watch_other_kinds() -> None:
    """Sparse ones, half precision, and one that is differentiated again."""
    rows = nn.Embedding(8, 4, sparse=True)
    half = nn.Linear(4, 3, bias=False).bfloat16()
    for model, inputs in ((rows, torch.tensor([1, 3])), (half, ONES.bfloat16())):
        optimizer = trained(model)
        for number, (change, words) in enumerate([
            (lambda grad: grad.data, None),
            (lambda grad: (grad._values() if grad.is_sparse else grad).data.abs().sum(), None),
            (lambda grad: doubled(grad._values() if grad.is_sparse else grad), "through grad."),
        ]):  # fmt: skip
            model(inputs).sum().backward()
            change(model.weight.grad)
            check_refusal(words, optimizer.step)
            if number == 0:
                optimizer.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad()
    smooth = nn.Linear(4, 3, bias=False)
    optimizer = trained(smooth)
    for _ in range(2):
        smooth(ONES).square().sum().backward(create_graph=True)
        (of_norm,) = torch.autograd.grad(smooth.weight.grad.square().sum(), smooth.weight)
        assert of_norm.abs().sum() > 0
        optimizer.step()
        optimizer.zero_grad()


def check_refusal(words: Optional[str], call: Callable[[], Any]) -> None:
    try:
        call()
    except P3Error as error:
        assert words is not None and words in str(error), (words, error)
    else:
        assert words is None, f"not refused: {words}"


def wait_before_they_are_written_again() -> None:
    """After a step, by what scripts zero gradients in place with."""
    model = nn.Linear(WIDE, WIDE, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = trained(model)
    aliases = []
    for number, zero in enumerate([
        lambda grad: grad.zero_(),
        lambda grad: grad.data.zero_(),
        lambda grad: grad.numpy().fill(0),
        lambda grad: torch._foreach_zero_([grad]),
        lambda grad: model.zero_grad(set_to_none=False),
        lambda grad: grad.detach().fill_(0),
        lambda grad: aliases[0].zero_(),
        lambda grad: optimizer.zero_grad(set_to_none=False),
    ], 1):  # fmt: skip
        model(torch.ones(1, WIDE)).sum().backward()
        aliases[:] = [model.weight.grad.data]
        if optimizer.rank == 1:
            time.sleep(0.2)
        optimizer.step()
        zero(model.weight.grad)
        expected = torch.full((WIDE, WIDE), -0.1 * number)
        torch.testing.assert_close(model.weight.detach(), expected)


def compare_where_aliases_may_be() -> None:
    """Of a gradient that stays: one that was made before, and one of a flat buffer."""
    for flat in (False, True):
        model = nn.Linear(4, 3, bias=False)
        optimizer = trained(model)
        if flat:
            buffer = torch.zeros(20)
            model.weight.grad = buffer[4:16].view(3, 4)
            other = nn.Parameter(torch.zeros(3))  # so that it is not always the weight's turn
            model.register_parameter("other", other)
            optimizer = trained(model)
            for _ in range(5):
                (model(ONES).sum() + other.sum()).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            alias = buffer.data[4:16]
        else:
            model(ONES).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            alias = model.weight.grad.data
        model(ONES).sum().backward()
        alias.clamp_(0, 0.5)
        check_refusal("was written to through grad.data", optimizer.step)


def say_what_a_second_backward_meets() -> None:
    for zero, words in [
        (lambda grad: None, "a second backward pass adds to it"),
        (lambda grad: grad.zero_(), "was written to in place"),
        (None, "has a new gradient before opt.step()"),
    ]:
        model = nn.Linear(4, 3, bias=False)
        optimizer = trained(model)
        model(ONES).sum().backward()
        if zero is None:
            optimizer.zero_grad()
        else:
            zero(model.weight.grad)
        check_refusal(words, model(ONES).sum().backward)


def leave_out_as_they_say() -> None:
    """A step, a parameter's gradient, and a part of each."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    optimizer = trained(model)
    model.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    for number in range(4):
        with optimizer.no_sync():
            model(ONES).sum().backward()
        if number == 1:  # all workers
            optimizer.zero_grad()
            continue
        model.bias.grad = None
        model.weight.grad.data.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight.detach(), torch.full((3, 4), -0.3))


refuse_changes(0)
refuse_changes(1)
let_others_read()
watch_other_kinds()
wait_before_they_are_written_again()
compare_where_aliases_may_be()
say_what_a_second_backward_meets()
leave_out_as_they_say()
print("no gradient changes unnoticed")
