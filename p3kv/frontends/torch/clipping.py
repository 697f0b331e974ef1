"""Steps that servers hold until they are decided: clipped by the norm of the mean of all workers'
gradients, or dropped."""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future
from typing import Any, Callable, Deque, Iterable, List, Optional, Union

import torch

from p3kv.common.combinations import Feature
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.values.watched import Watcher, unwatch, watch
from p3kv.store.clipped_steps import ClippedSteps
from p3kv.worker.stores import WorkerStore

_EPSILON = 1e-6
"""Added to the norm, as in torch."""


NOT_FINITE = (
    "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be "
    "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
    "`error_if_nonfinite=False`"
)
"""What torch raises."""


class Clipping:
    """Has the servers hold a script's steps until they are decided, if its first step says so: by
    the norm of all gradients, by what workers vote, or by whether a scaled loss has overflowed.

    Servers must know that a step is held before its first gradient comes, and the script says so
    after `backward`. So no gradient of the first step leaves before the script has shown whether it
    is. If it is, servers hold all later steps, too, and gradients leave during `backward`.
    Belongs to the script's thread.
    """

    def __init__(
        self,
        own: WorkerStore,
        steps: ClippedSteps,
        workers: int,
        barrier: Callable[[str], None],
        may_leave_out: bool,
        dtypes: Iterable[torch.dtype],
    ) -> None:
        """`barrier(purpose)` waits for all workers. `may_leave_out`: the script may leave out steps
        that it has clipped, and not say so. `dtypes`: those of parameters, by which norms have
        theirs, in single precision at least."""
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._may_leave_out = may_leave_out
        self._own = own
        self._steps = steps
        self._workers = workers
        self._barrier = barrier
        self.is_clipped = self.has_clipped = False
        """Whether this step has been clipped, so that servers know of its end, and whether any
        has."""
        self._votes: Optional[bool] = None
        """Whether each worker votes on each step; None: in the first step, so it does, and in the
        second."""
        self._has_said = self._drops = False
        """Whether the script has said in this step if this worker drops it, and whether it does."""
        self.factors: List[Union[float, LateNorm]] = []
        """By what the script has had this step's gradients be multiplied: a number, or the factor
        of a norm."""
        self.last_factors: List[Union[float, LateNorm]] = []
        """Those of the last step."""
        self._outcomes: List[Late] = []
        """Of this step, to be known once it has ended."""
        self._late: Deque[Late] = deque()
        """Those that may be late still."""
        self._last = math.inf, False
        """To what the last step was clipped, and whether it was to be dropped unless its norm was
        finite."""
        self.is_known = False
        """Whether the script has shown if it holds steps, so that gradients may leave."""
        steps.epsilon = workers * _EPSILON

    def begin(self, call: str) -> None:
        """To be called when a step is to be held, before its last gradients leave. Raises
        NotSupportedError where this comes too late for `call`."""
        if self._steps.clips:
            return
        if self.is_known:
            raise NotSupportedError(
                f"{call} was not called in the first step, so gradients have left without being "
                f"held for it: call it in each step from the first one on{_IN_OTHER_STEPS[call]}"
            )
        if call == "clip_grad_norm_":
            self._own.combine({Feature.CLIPPING}, f"opt.{call}()")
        self._steps.clip(math.inf, self._barrier)
        self._steps.has_votes = True
        self.is_known = True

    def begin_clip(self, drops_nonfinite: bool) -> None:
        """To be called when a step is to be clipped, and perhaps to be dropped; raises as
        `begin`."""
        if self.is_clipped:
            raise NotSupportedError("clip_grad_norm_ was called before in this step: call it once")
        if drops_nonfinite:
            self._check_dropping("opt.clip_grad_norm_(error_if_nonfinite=True)")
        self.begin("clip_grad_norm_")
        self.has_clipped = True

    def clip(self, max_norm: float, drops_nonfinite: bool) -> LateNorm:
        """Clips the step, all gradients of which have left; returns the norm of the mean gradient.
        `drops_nonfinite`: the step is dropped if that is not finite."""
        # Nobody may have read those that came with the weights. Where workers go on with older
        # values, later ones are under way.
        while self._late and self._late[0].is_known:
            self._late.popleft().take()
        self.is_clipped = True
        self._steps.drops_nonfinite |= drops_nonfinite
        self._end(max_norm * self._workers)
        for outcome in self._outcomes:
            if isinstance(outcome, LateOverflow):  # the script may leave out the step, and ask
                outcome.comes(self._steps.norm())
        norm = LateNorm(self._steps.norm(), self._workers, max_norm, self._dtype)
        self._late.append(norm)
        self.factors.append(norm)
        return norm

    def skip(self, drops: bool) -> torch.Tensor:
        """Has all workers drop the step, if any of them says so; returns whether it is dropped."""
        if self._votes is False:
            raise NotSupportedError(
                "skip_step was not called in the first step, so servers do not wait for what "
                "workers say: call it in each step from the first one on, with False in those that "
                "are not to be skipped"
            )
        if self._votes is None:
            self._check_dropping("opt.skip_step()")
        self.begin("skip_step")
        self._has_said = True
        self._drops |= drops
        outcome = LateFlag("what skip_step returns")
        self._outcomes.append(outcome)
        return outcome.tensor

    def unscale(self, factor: float, overflow: LateOverflow) -> None:
        """Has all gradients of the step be multiplied by `factor` before their norm counts, and the
        step be dropped where a sum of them is not finite; `overflow` tells whether one is."""
        if self.is_clipped:
            raise NotSupportedError(
                "opt.clip_grad_norm_() was called before scaler.step(), which unscales gradients "
                "that were clipped as they were: call scaler.unscale_(optimizer) before"
            )
        if not self._steps.clips:
            self._check_dropping("GradScaler")
        self.begin("GradScaler")
        self._steps.factor, self._steps.drops_nonfinite = factor, True
        self.factors.append(factor)
        self._outcomes.append(overflow)

    @property
    def can_drop(self) -> bool:
        """Whether servers hold this step, and nothing is said of what becomes of it."""
        return self._steps.clips and not (self.is_clipped or self._has_said or self.factors)

    @property
    def can_be_voted_down(self) -> bool:
        """Whether the step is clipped, and can be dropped still, since workers vote on it."""
        return self.is_clipped and self._steps.has_votes and not self._has_said

    def drop(self) -> None:
        """Has servers drop the step, all gradients of which have left, as all workers say. There
        is none after it."""
        if not self.is_clipped:
            self._steps.drops = True
            self._end(math.inf)
        if self._steps.has_votes:
            self._steps.vote(True)

    def end_step(self) -> None:
        """To be called when all gradients of a step have left, held or not."""
        steps = self._steps
        if steps.clips:
            if not self.is_clipped:
                self._end(math.inf)
            if steps.has_votes:
                steps.vote(self._drops)
            if self._votes is None:
                self._votes = self._has_said or self._may_leave_out
            else:
                steps.has_votes = self._votes
            while self._late and self._late[0].is_known:
                self._late.popleft().take()
            for outcome in self._outcomes:
                is_norm = isinstance(outcome, LateOverflow)
                outcome.comes(steps.norm() if is_norm else steps.is_dropped())
            self._late += self._outcomes
            self._outcomes = []
        self.is_clipped = self._has_said = self._drops = False
        steps.factor = 1.0
        self.last_factors, self.factors = self.factors, []
        self.is_known = True

    def clip_as_before(self) -> None:
        """Clips the step as the last one: this worker has no batch for it, and says nothing new."""
        if self._steps.clips:
            max_norm, self._steps.drops_nonfinite = self._last
            self._end(max_norm)
            self.is_clipped = True

    def wait(self) -> None:
        """Waits for all that is late, and is not of an open step."""
        while self._late:
            self._late.popleft().take()

    def _check_dropping(self, what: str) -> None:
        """Raises NotSupportedError where no step can be dropped."""
        self._own.combine_with_codecs({Feature.DROPPING}, what)

    def _end(self, max_norm: float) -> None:
        self._last = max_norm, self._steps.drops_nonfinite
        self._steps.max_norm = max_norm
        self._steps.end()
        self._steps.drops_nonfinite = False


_IN_OTHER_STEPS = {
    "clip_grad_norm_": ", with max_norm=math.inf in those that are not to be clipped",
    "skip_step": ", with False in those that are not to be skipped",
    "GradScaler": "",
}


class Late(Watcher):
    """A number of a step that is under way: whoever reads `tensor` waits for it."""

    def __init__(self, tensor: torch.Tensor, called: str) -> None:
        self.tensor = tensor
        self._called = called
        self._of: Optional[Future[Any]] = None
        self._is_late = True
        self._taking = threading.Lock()
        watch(self, (tensor,))

    def comes(self, of: Optional[Future[Any]]) -> None:
        """Says by what it will be known."""
        assert of is not None
        self._of = of

    def is_now(self, number: Any) -> None:
        """Says what will be known by now."""
        self._of = Future()
        self._of.set_result(number)

    @property
    def is_known(self) -> bool:
        """Whether nobody has to wait."""
        return self._of is not None and self._of.done()

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        may_begin_forward()
        self.take()

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        """Waits for the number, unless it is there. Raises the job's failure, and
        NotSupportedError before the step has ended by which it is known."""
        if not self._is_late:
            return
        if self._of is None:
            self._is_early()
        if self._of is None:
            raise NotSupportedError(
                f"{self._called} is known only after opt.step(), when all workers have called it: "
                "read it then"
            )
        number = waited(self._of.result)
        with self._taking:
            if self._is_late:
                with torch._C.DisableTorchFunctionSubclass():
                    self.tensor.fill_(self._made_of(number))
                unwatch(self, (self.tensor,))
                self._is_late = False

    def _is_early(self) -> None:
        """The script asks for it before the step has ended."""

    @abstractmethod
    def _made_of(self, number: Any) -> Union[float, bool]:
        """The number of what has come."""


class LateNorm(Late):
    """The norm of the mean of all workers' gradients."""

    def __init__(
        self, of_sum: Optional[Future[float]], workers: int, max_norm: float, dtype: torch.dtype
    ) -> None:
        """`of_sum` is the norm of the sum of all gradients, whose mean is clipped to `max_norm`."""
        super().__init__(torch.zeros((), dtype=dtype, device="cpu"), "the norm")
        self._workers = workers
        self._max_norm = max_norm
        self.comes(of_sum)

    def factor(self) -> torch.Tensor:
        """By what torch multiplies gradients of this norm to clip them. Waits for the norm."""
        self.take()
        return (self._max_norm / (self.tensor + _EPSILON)).clamp(max=1.0)

    def _made_of(self, number: float) -> float:
        return number / self._workers


class LateFlag(Late):
    """Whether a step is dropped."""

    def __init__(self, called: str) -> None:
        super().__init__(torch.zeros((), dtype=torch.bool, device="cpu"), called)

    def _made_of(self, number: bool) -> bool:
        return number


class LateOverflow(Late):
    """Whether a sum of gradients is not finite, as a number, which torch's scalers want."""

    def __init__(self, on_early: Optional[Callable[[], object]] = None) -> None:
        """`on_early()` may say it when the script asks before the step has ended."""
        super().__init__(
            torch.zeros((), dtype=torch.float32, device="cpu"), "whether gradients have overflowed"
        )
        self._on_early = on_early

    def _is_early(self) -> None:
        if self._on_early is not None:
            self._on_early()

    def _made_of(self, number: float) -> float:
        return float(not math.isfinite(number))


def checked(max_norm: Any, norm_type: Any) -> float:
    """The number to clip to; ConfigError for one that is not a number from 0 on, NotSupportedError
    for what servers can't do."""
    if float(norm_type) != 2:
        raise NotSupportedError(
            f"norm_type is {norm_type}; servers compute the norm of type 2 only"
        )
    number = float(max_norm)
    if not number >= 0:
        raise ConfigError(f"max_norm is {max_norm}; it must be a number from 0 on")
    return number
