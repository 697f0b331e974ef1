"""Steps whose gradients are clipped by the norm of the mean of all workers' gradients."""

from __future__ import annotations

import math
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, Callable, Deque, Optional

import torch

from p3kv.common.combinations import Feature
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.values.watched import Watcher, unwatch, watch
from p3kv.store.clipped_steps import ClippedSteps
from p3kv.worker.stores import WorkerStore

_EPSILON = 1e-6
"""Added to the norm, as in torch."""


class Clipping:
    """Has the servers hold a script's steps for their norms, if its first step is clipped.

    Servers must know that a step is clipped before its first gradient comes, and the script says so
    after `backward`. So no gradient of the first step leaves before the script has shown whether it
    clips. If it does, servers hold all later steps, too, and gradients leave during `backward`.
    Belongs to the script's thread.
    """

    def __init__(
        self,
        own: WorkerStore,
        steps: ClippedSteps,
        workers: int,
        barrier: Callable[[str], None],
    ) -> None:
        """`barrier(purpose)` waits for all workers."""
        self._own = own
        self._steps = steps
        self._workers = workers
        self._barrier = barrier
        self._in_step = False
        """Whether this step has been clipped."""
        self._norms: Deque[LateNorm] = deque()
        """Those that may be late still."""
        self.is_known = False
        """Whether the script has shown if it clips, so that gradients may leave."""
        steps.epsilon = workers * _EPSILON

    def begin(self) -> None:
        """To be called when a step is to be clipped, before its last gradients leave. Raises
        NotSupportedError where this comes too late."""
        if self._in_step:
            raise NotSupportedError("clip_grad_norm_ was called before in this step: call it once")
        if self._steps.clips:
            return
        if self.is_known:
            raise NotSupportedError(
                "clip_grad_norm_ was not called in the first step, so gradients have left without "
                "being held for their norm: call it in each step from the first one on, with "
                "max_norm=math.inf in those that are not to be clipped"
            )
        self._own.combine({Feature.CLIPPING}, "opt.clip_grad_norm_()")
        self._steps.clip(math.inf, self._barrier)
        self.is_known = True

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the step, all gradients of which have left; returns the norm of the mean gradient,
        for which whoever reads it waits."""
        # Nobody may have read those that came with the weights. Where workers go on with older
        # values, later ones are under way.
        while self._norms and self._norms[0].is_known:
            self._norms.popleft().take()
        self._in_step = True
        self._steps.max_norm = max_norm * self._workers
        self._steps.end()
        of_sum, norm = self._steps.norm(), torch.zeros((), device="cpu")
        assert of_sum is not None
        self._norms.append(LateNorm(norm, of_sum, self._workers))
        return norm

    def end_step(self) -> None:
        """To be called when all gradients of a step have left, clipped or not."""
        if self._steps.clips and not self._in_step:
            self._steps.max_norm = math.inf
            self._steps.end()
        self._in_step = False
        self.is_known = True

    def wait(self) -> None:
        """Waits for all norms."""
        while self._norms:
            self._norms.popleft().take()


class LateNorm(Watcher):
    """A norm that is under way."""

    def __init__(self, norm: torch.Tensor, of_sum: Future[float], workers: int) -> None:
        """`of_sum` is the norm of the sum of all gradients. Whoever reads `norm` waits from now
        on."""
        self._norm = norm
        self._of_sum = of_sum
        self._workers = workers
        self._is_late = True
        self._taking = threading.Lock()
        watch(self, (norm,))

    @property
    def is_known(self) -> bool:
        """Whether nobody has to wait."""
        return self._of_sum.done()

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        may_begin_forward()
        self.take()

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        """Waits for the norm, unless it is there. Raises the job's failure."""
        if not self._is_late:
            return
        of_sum = waited(self._of_sum.result)
        with self._taking:
            if self._is_late:
                with torch._C.DisableTorchFunctionSubclass():
                    self._norm.fill_(of_sum / self._workers)
                unwatch(self, (self._norm,))
                self._is_late = False


def checked(max_norm: Any, norm_type: Any, error_if_nonfinite: bool) -> float:
    """The number to clip to; ConfigError for one that is not a number from 0 on, NotSupportedError
    for what servers can't do."""
    if float(norm_type) != 2:
        raise NotSupportedError(
            f"norm_type is {norm_type}; servers compute the norm of type 2 only"
        )
    if error_if_nonfinite:
        raise NotSupportedError(
            "error_if_nonfinite=True would wait for the norm before any weight is updated; read "
            "the norm that is returned, or set P3KV_CHECK_FINITE=1, which ends the job and names "
            "the gradient"
        )
    number = float(max_norm)
    if not number >= 0:
        raise ConfigError(f"max_norm is {max_norm}; it must be a number from 0 on")
    return number
