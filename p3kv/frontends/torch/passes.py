"""Which backward passes' gradients may leave at once, where a script does not say so; and when a
pass has ended."""

from __future__ import annotations

import functools
import threading
from typing import Any, Container, Dict, FrozenSet, Iterable, List, Sequence, Set, Tuple
from weakref import WeakSet

import torch

Kind = FrozenSet[Tuple[Tuple[int, bool], bool]]
"""What shows of a backward pass when the models are called before it: which, whether a model's
input comes from something that is trained, and whether more than one call was like this."""


class Passes:
    """The backward passes of a step, of which the script says itself, by `no_sync`, which are not
    the last. Their gradients are to leave all the same, in `step`."""

    are_local = False
    """Whether all since the last step were in `no_sync` of models."""

    def __init__(self) -> None:
        self.adds_up = False
        """Whether gradients add up now, and do not leave: in the optimizer's `no_sync`."""
        self.steps = 0
        """How many there were."""
        self.adds = self.adds_plainly = False
        """Whether a pass may have added to gradients of the step since they began to leave; and
        whether each such had calls of its own, and was in no `no_sync`."""
        self._has_passed = False

    @property
    def has_passed(self) -> bool:
        """Whether there was a pass since the last step that may count in it."""
        return self._has_passed

    @property
    def syncs(self) -> bool:
        """Whether the pass under way, or the next one, is in no `no_sync`."""
        return not self.adds_up

    def reached(self, parameter: torch.Tensor) -> Tuple[bool, bool]:
        """A gradient is complete; returns whether it leaves, and whether it would if workers
        updated."""
        self._has_passed = True
        if self.adds_up:
            self.adds, self.adds_plainly = True, False
            return False, False
        return True, True

    def leave(self) -> None:
        """Gradients of the step leave from now on, those of the pass under way among them."""
        self.adds, self.adds_plainly = False, True

    def step_ends(self) -> None:
        """The optimizer has made a step."""
        self.steps += 1
        self._has_passed = False

    def end(self) -> None:
        """The optimizer trains no more."""
        _all.discard(self)


class CalledPasses(Passes):
    """Tells the last backward pass before a step from others, by what is called before each.

    A gradient leaves once in a step. In scripts for DistributedDataParallel several passes may
    reach a weight between two steps: those of another model's loss (as a GAN's generator's, which
    goes through the critic), or gradients that add up without `no_sync`. A kind of passes that was
    once followed by another pass and not by a step never leaves early. Its gradients leave in
    `step`, as they are then, and so do those of the first pass of a kind after the first step. In
    the first step nothing leaves before `step` anyway, and the optimizer sees what the script does.
    """

    def __init__(self, parameters: Container[int]) -> None:
        """`parameters`: the ids of those that the optimizer trains."""
        super().__init__()
        self._parameters = parameters
        self.leaves = False
        """Whether gradients of the pass under way leave as soon as they are computed."""
        self._calls: Dict[Tuple[int, bool], int] = {}
        """Calls of models since the last backward pass."""
        self._syncs = True
        """Whether any of them is in no `no_sync` of the model."""
        self._kind: Kind = frozenset()
        self._has_begun = False
        """Whether the pass that belongs to these calls has begun."""
        self._is_open = self._has_ended = False
        """Whether gradients have come since a `backward` ended, and whether one has since then."""
        self._come: Dict[int, int] = {}
        """By the parameter's id, in which call of `backward` its gradient came, since the pass that
        belongs to these calls has begun."""
        self._in_parts: Set[Kind] = set()
        self._since_step: List[Kind] = []
        """The passes since the last step, but those in `no_sync`."""
        self._has_unsynced = False
        """Whether there was one in `no_sync`, too."""
        self._is_last: Dict[Kind, bool] = {}
        """Whether all passes of a kind were the last before a step."""
        self._before: Tuple[Any, ...] = ()
        """A model, and what was known before its call."""
        _all.add(self)

    def called(self, model: int, is_fed: bool, syncs: bool) -> bool:
        """A model is called, for a backward pass to come. `is_fed`: its input comes from something
        that is trained. `syncs`: the call is in no `no_sync`. Returns whether gradients of the pass
        may add up with others."""
        self._before = model, self._known()
        if self._has_begun:
            self._has_begun = self._has_ended = False
            self._calls, self._come = {}, {}
        # As torch's reducer does, which no call in no_sync tells to expect less. No pass may have
        # come to such a call, as where the model was frozen then.
        self._syncs = syncs or (self._syncs and bool(self._calls))
        call = model, is_fed
        self._calls[call] = self._calls.get(call, 0) + 1
        self._kind = frozenset((call, number > 1) for call, number in self._calls.items())
        self.leaves = self._syncs and (not self.steps or self._is_last.get(self._kind, False))
        return not self.leaves

    def _known(self) -> Dict[str, Any]:
        names = "_has_begun", "_has_ended", "_come", "_syncs", "_kind", "leaves"
        return {**{name: getattr(self, name) for name in names}, "_calls": dict(self._calls)}

    def forget_call(self, model: int) -> None:
        """The last call of a model has raised."""
        if self._before[:1] == (model,):
            vars(self).update(self._before[1])
            self._before = ()

    @property
    def syncs(self) -> bool:
        return self._syncs and not self.adds_up

    @property
    def is_awaited(self) -> bool:
        """Whether models have been called, and the pass that belongs to these calls has not
        begun."""
        return bool(self._calls) and not self._has_begun

    def is_uncalled(self, roots: Iterable[Any]) -> bool:
        """Whether the pass that begins now from `roots` belongs to no calls of models, whosever
        these are, but those of one that has ended."""
        return self._has_ended and not any(
            one.is_awaited and is_reached(one._parameters, roots) for one in _all
        )

    def reached(self, parameter: torch.Tensor) -> Tuple[bool, bool]:
        """One that comes once more, in another pass without a call of a model, does not leave, as
        with DistributedDataParallel, which expects none."""
        if self.adds_up:
            return super().reached(parameter)
        if not self._is_open:
            self.adds, was_called = True, not self._has_ended
            self.adds_plainly &= self.syncs and was_called
        self._is_open = True
        if not self._has_begun:
            self._has_begun = True
            if self.syncs:
                self._since_step.append(self._kind)
            self._has_unsynced |= not self.syncs
        if self._come.setdefault(id(parameter), _passes) != _passes:
            self._has_unsynced = True
            return False, False
        return self.leaves, self.syncs

    def all_came(self, parameters: Iterable[torch.Tensor]) -> None:
        """These parameters' gradients have come, also those of which no hook has told."""
        self._come.update((id(one), 0) for one in parameters if one.grad is not None)

    @property
    def has_passed(self) -> bool:
        return bool(self._since_step)

    @property
    def are_local(self) -> bool:  # type: ignore[override]
        return self._has_unsynced and not self._since_step

    def ended(self) -> bool:
        """`backward` has ended; returns whether no more gradients come before the step."""
        if not self._is_open:
            return False
        if self._has_ended:
            self._in_parts.add(self._kind)
        self._is_open, self._has_ended = False, True
        return self.leaves and self._kind not in self._in_parts

    def step_ends(self) -> None:
        super().step_ends()
        if self._since_step:
            *others, last = self._since_step
            self._is_last.setdefault(last, True)
            self._is_last.update((kind, False) for kind in others)
        self._since_step, self._has_unsynced = [], False


_all: WeakSet[Any] = WeakSet()
"""Those of all optimizers of this process whose models tell."""
_every: WeakSet[Any] = WeakSet()
"""All steps of this process, and what else has a `number` and is told of passes."""
_passes = 0
"""How many calls of torch.autograd.backward there were, without those inside one."""
_open_calls = 0
"""How many calls of torch.autograd.backward there are, without those inside one."""
_calling = threading.Lock()


def tell_of_passes(steps: Any) -> None:
    """Has `steps.begin_pass` be called with the roots of backward passes before these, and
    `steps.finish` when they have ended, whosever they are. Several wait for each other's in the
    same order on all workers."""
    _watch_backward()
    _every.add(steps)


def tell_no_more(steps: Any) -> None:
    """Others have taken over what `steps` has trained."""
    _every.discard(steps)


def is_in_backward() -> bool:
    """Whether torch.autograd.backward is under way."""
    return _open_calls > 0


def is_reached(parameters: Container[int], roots: Iterable[Any]) -> bool:
    """Whether a backward pass from `roots` reaches one of these parameters, by id."""
    waiting, seen = [getattr(one, "grad_fn", None) for one in roots], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        waiting += [one for one, _ in node.next_functions]
    return False


def _in_order() -> List[Any]:
    return sorted(_every, key=lambda one: one.number)


@torch._disable_dynamo
def _begin(roots: Sequence[Any]) -> None:
    for one in _in_order():
        one.begin_pass(roots)


@torch._disable_dynamo
def _finish() -> None:
    for one in _in_order():
        one.finish()


@functools.lru_cache(maxsize=None)
def _watch_backward() -> None:
    """Has passes end when torch.autograd.backward ends, which Tensor.backward calls. torch's engine
    has callbacks for the end of a pass, but those of a pass inside a pass, as reentrant checkpoints
    make one, come too early, and nothing tells such a pass.

    Where `backward` raises, the pass stays open: the script's next one goes on with it.
    """
    backward = torch.autograd.backward

    @functools.partial(torch._disable_dynamo, recursive=False)
    @functools.wraps(backward)
    def call_and_finish(*arguments: Any, **more: Any) -> Any:
        global _open_calls, _passes
        if torch._C._current_graph_task_id() != -1:
            return backward(*arguments, **more)
        with _calling:
            _open_calls += 1
            is_first = _open_calls == 1
            _passes += is_first
        try:
            if is_first:
                roots = arguments[0] if arguments else more.get("tensors", ())
                roots = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
                _begin(roots)
            result = backward(*arguments, **more)
        finally:
            with _calling:
                _open_calls -= 1
                is_last = not _open_calls
        if is_last:
            _finish()
        return result

    torch.autograd.backward = call_and_finish
