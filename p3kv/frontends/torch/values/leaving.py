"""Gradients on their way to the servers: nobody may change one unnoticed.

torch counts writes into a tensor, but not those through `grad.data`, NumPy or an address. So until
it has left, a gradient is of the class of late tensors, as is whatever is made of its memory.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple, Union
from weakref import ref

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.tensors import bits
from p3kv.frontends.torch.values.watched import (
    Watcher,
    forget,
    gives_memory,
    is_watched,
    name_of,
    pass_on,
    unwatch,
    watch,
    watcher_of,
)

_NO_SYNC = (
    "or call backward in 'with opt.no_sync():', after which gradients leave in opt.step(), as they "
    "are then; or give updates='workers' to p3kv.torch.Optimizer, or set P3KV_UPDATES=workers, by "
    "which each gradient is the mean of all workers' when backward returns"
)
_CHANGE_BEFORE = (
    "clip by opt.clip_grad_norm_(max_norm), which clips the mean of all workers' gradients; change "
    "a gradient before it leaves, by parameter.register_hook(lambda grad: ...), and not in a hook "
    f"of opt.step(); {_NO_SYNC}"
)
LEAVE_OUT_BEFORE = (
    "call zero_grad after opt.step(). To leave out a step, call opt.skip_step(True) and "
    "opt.step(): all workers call skip_step in each step, and all leave it out if it is true on "
    "any; to leave out a parameter, freeze it (requires_grad=False) before the forward pass; "
    f"{_NO_SYNC}"
)


OnUse = Callable[["Own", str], bool]
"""Called with a gradient, and the name of a function of torch, when the script is about to use it;
returns whether that is no way to the servers any more."""


class _Alias(NamedTuple):
    tensor: torch.Tensor
    version: int
    """torch's count of writes when the script got it."""
    function: str
    """What has given it to the script."""


class Leaving(Watcher):
    """A gradient that `backward` has computed, until it has left and the step is over.

    Before the step ends nobody may change it; after that, who is about to waits until it has left.
    `has_left` is called in the worker's thread, all else in threads of the script.
    """

    __slots__ = (
        "_aliases", "_copy", "_function", "_has_left", "_is_over", "_version", "_wait", "factors",
        "gradient", "in_step", "on_use", "travels", "weight",
    )  # fmt: skip

    def __init__(
        self, weight: Any, gradient: torch.Tensor, wait: Callable[[], None], keeps_copy: bool
    ) -> None:
        """`weight`: the `Weight` whose it is. `wait` returns when it has left. `keeps_copy`: the
        script may have aliases from before, and the gradient is compared with a copy."""
        self.weight = weight
        self._wait = wait
        self.factors: Optional[int] = None
        """By how many of the step's factors the mean of all workers' is multiplied, which it has
        become; None: it is this worker's own."""
        self.gradient = gradient
        self._version = gradient._version
        self._aliases: Tuple[_Alias, ...] = ()
        self._copy: Optional[torch.Tensor] = None
        """The gradient as it was before its memory was given to the script."""
        self._function = "data"
        """What has given it."""
        self.travels = False
        """Whether the network reads the gradient's own memory."""
        self.in_step, self._has_left, self._is_over = True, False, False
        self.on_use: Optional[Callable[[], Optional[OnUse]]] = None
        """What is told of uses, which may be gone."""
        end_past(gradient)
        if is_watched(gradient):  # that of another parameter, too
            self._copy = _copied(gradient)
            return
        if keeps_copy:
            self._copy = _copied(gradient)
        watch(self, (gradient,))

    @property
    def is_new(self) -> bool:
        """Whether nobody had written to it when it was computed."""
        return not self._version and self._copy is None

    @property
    def writes(self) -> int:
        """How often torch has seen it written to since it was computed."""
        return self.gradient._version - self._version

    def change(self, now: Optional[torch.Tensor]) -> Optional[str]:
        """How the gradient has changed, whose parameter has `now`, in words; None if it has not."""
        is_same = now is self.gradient and self._version == now._version
        if is_same and self._copy is None and not self._aliases:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return self._change(now)

    def check(self, now: Optional[torch.Tensor]) -> None:
        """Raises NotSupportedError if the gradient has changed, whose parameter has `now`."""
        change = self.change(now)
        if change is not None:
            if self.factors is not None:
                raise NotSupportedError(
                    f"the gradient of '{self.weight.name}' {change} between backward and step, for "
                    "the first time after the first step: it is the mean of all workers' that the "
                    "script has read, and servers have updated the weight by it. Set "
                    "P3KV_UPDATES=workers, by which the script's change counts"
                )
            zero = now is None or not now.any()
            raise NotSupportedError(
                f"the gradient of '{self.weight.name}' {change} after backward had computed it and "
                "before opt.step(), when it had left for the servers: "
                + (LEAVE_OUT_BEFORE if zero else _CHANGE_BEFORE)
            )

    def becomes(self, mean: torch.Tensor, factors: int) -> None:
        """Has the gradient, which has left, be the mean of all workers', as in `factors`."""
        _become(self.gradient, mean)
        self._copy, self.factors = _copied(self.gradient), factors
        self.travels = False

    def stays(self) -> None:
        """It is no way to the servers any more."""
        self._is_over = True
        self._back()

    def is_dropped(self) -> None:
        """Whatever servers get of it does not count, and the script may change it."""
        self.travels = False
        self.stays()

    def step_ends(self) -> None:
        """The script may change the gradient, once it has left."""
        self.in_step = False
        if self._has_left or not self.travels:
            self._ends()

    def has_left(self) -> Optional[NotSupportedError]:
        """The network does not read it any more; an error if it has changed since the step."""
        self._has_left = True
        if self.in_step:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            has_changed = self.travels and self._has_changed()
        self._ends()
        if not has_changed:
            return None
        return NotSupportedError(
            f"the gradient of '{self.weight.name}' was changed after opt.step(), while it was "
            "still being sent: call zero_grad before the next backward pass, and opt.wait() before "
            "an operation with out=gradient"
        )

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        """Whoever has the gradient may do anything with it."""
        if tensor is not None and self._used("data"):
            return
        if self.in_step:
            self._give("data")
        else:
            self._wait()

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        name = name_of(function)
        if self._used(name):
            return
        if gives_memory(function):
            if self.in_step:
                self._give(name)
            else:
                self._wait()
        elif not self.in_step and (name == "data" or _writes(name)):
            self._wait()

    def gave(self, tensor: torch.Tensor, function: Any, result: Any) -> None:
        if self._is_over:
            return
        if gives_memory(function):
            for one in (self.gradient, *(alias.tensor for alias in self._aliases)):
                self._watch(one)
        name = name_of(function)
        if not name.startswith("_foreach_"):  # these give new tensors, or those that they had
            for one in _tensors_in(result):
                if not is_watched(one) and _share(one, self.gradient):
                    self._aliases += (_Alias(one, one._version, name),)
                    self._watch(one)
        if self._has_left and not self.in_step:
            self._ends()

    def _change(self, now: Optional[torch.Tensor]) -> Optional[str]:
        gradient = self.gradient
        if now is None:
            return "was set to None"
        if self.factors is not None:
            assert self._copy is not None
            return "was changed" if _differ(now, self._copy) else None
        if gradient._version != self._version:
            return "was written to in place"
        for alias in self._aliases:
            if alias.tensor._version != alias.version:
                return f"was written to through grad.{alias.function}"
        if self._copy is not None and _differ(self._copy, gradient):
            return f"was written to through grad.{self._function}"
        if now is not gradient and _differ(now, gradient):
            return "was replaced by another tensor"
        return None

    def _has_changed(self) -> bool:
        if self.gradient._version != self._version:
            return True
        return self._copy is not None and _differ(self._copy, self.gradient)

    def _give(self, function: str) -> None:
        """Keeps a copy to compare with, for a function that needs the gradient's own class."""
        self._back()
        if self._copy is None:
            self._copy, self._function = _copied(self.gradient), function

    def _watch(self, tensor: torch.Tensor) -> None:
        if not is_watched(tensor):
            watch(self, (tensor,))

    def _ends(self) -> None:
        """The step is over, and the gradient has left."""
        if self.on_use is not None:
            pass_on(self, Past(self), self.gradient)
        self._back()

    def _used(self, function: str) -> bool:
        if self._is_over:  # a function has the gradient twice
            return True
        on_use = None if self.on_use is None else self.on_use()
        if on_use is None or self.in_step:
            return on_use is not None and on_use(self, function)
        self._wait()
        past = watcher_of(self.gradient)
        if isinstance(past, Past):
            past.tell(function)
        return False

    def _back(self) -> None:
        unwatch(self, (self.gradient,))
        if self._aliases:
            unwatch(self, [alias.tensor for alias in self._aliases])


class Past(ref, Watcher):
    """A worker's own gradient of a step that is over, as long as the script has it: uses of it are
    told still. Keeps nothing alive."""

    __slots__ = ("_number", "_on_use", "_version", "_weight", "factors", "round")
    __eq__, __hash__ = object.__eq__, object.__hash__  # and not those of the tensor
    in_step = False

    def __new__(cls, leaving: Leaving) -> Past:
        return super().__new__(cls, leaving.gradient, Past._gone)

    def __init__(self, leaving: Leaving) -> None:
        assert leaving.on_use is not None
        self._number, self._on_use = id(leaving.gradient), leaving.on_use
        self._weight = ref(leaving.weight)
        self.factors = leaving.factors
        """As in `Leaving`."""
        self.round = leaving.weight.key.round
        self._version = leaving.gradient._version

    @property
    def weight(self) -> Any:
        """Its parameter's, which is there while steps are that are told."""
        weight = self._weight()
        assert weight is not None
        return weight

    @property
    def gradient(self) -> torch.Tensor:
        gradient: Optional[torch.Tensor] = self()
        assert gradient is not None
        return gradient

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        if tensor is not None:
            self.tell("data")

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        self.tell(name_of(function))

    def tell(self, function: str) -> None:
        """Tells of a use, unless all numbers are new by it."""
        on_use = self._on_use()
        if function in ZEROES:
            self.stays()
        elif on_use is not None:
            on_use(self, function)

    @property
    def is_as_it_was(self) -> bool:
        """Whether torch has seen no write into it since the step."""
        return self._version == self.gradient._version

    def becomes(self, mean: torch.Tensor, factors: Optional[int]) -> None:
        """As in `Leaving`; without `factors` it is this worker's own again."""
        _become(self.gradient, mean)
        self.factors = factors

    def stays(self) -> None:
        """It is what it is with DistributedDataParallel, and uses are told no more."""
        unwatch(self, (self.gradient,))

    def _gone(self) -> None:
        forget(self, self._number)


Own = Union[Leaving, Past]
"""A worker's own gradient, which may become the mean."""
ZEROES = {"zero_", "_foreach_zero_"}


def end_past(gradient: torch.Tensor) -> None:
    """A gradient of a step that is over is zeroed, or a backward pass has added to it."""
    watcher = watcher_of(gradient)
    if isinstance(watcher, Past):
        watcher.stays()


def _become(gradient: torch.Tensor, mean: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        gradient.data.copy_(mean)


def _copied(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().clone()


def _writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for one in result:
            yield from _tensors_in(one)


def is_part(gradient: torch.Tensor) -> bool:
    """Whether a gradient, which nobody watches, has a part of a larger memory of the script's."""
    values = gradient._values() if gradient.is_sparse else gradient
    return values.untyped_storage().nbytes() > values.numel() * values.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return _address(one) == _address(other)


def _address(tensor: torch.Tensor) -> int:
    tensor = tensor._values() if tensor.is_sparse else tensor
    return tensor.untyped_storage().data_ptr()


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
        return True
    if not one.is_sparse:
        return not torch.equal(bits(one), bits(other))
    one, other = one.coalesce(), other.coalesce()
    same_rows = torch.equal(one.indices(), other.indices())
    return not same_rows or not torch.equal(bits(one.values()), bits(other.values()))
