"""How an optimizer trains: what `AloneSteps`, `ServerSteps` and the like have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from typing import Any, Callable, ContextManager, Dict, List, NoReturn, Optional, Sequence, Union

import torch

from p3kv.common.combinations import Feature
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.joining import Attendance, How, joined
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of
from p3kv.frontends.torch.shares import Pace
from p3kv.frontends.torch.values.compiled import own_name
from p3kv.worker.stores import WorkerStore
from p3kv.worker.worker import Worker

Number = Union[int, float]


class Steps(ABC):
    """Makes an optimizer's steps. Where a subclass says nothing else, this process updates the
    weights itself: the script's optimizer has all states, and gradients are this process's.

    Belongs to the script's thread.
    """

    _skips = False
    """Whether this step is skipped."""

    updates = "workers"
    """Who updates the weights."""
    why: Optional[str] = None
    """Why workers do it, where the script has not said that they are to."""

    def __init__(self, model: Optional[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is the script's; `model` names its parameters."""
        self._model = model
        self._optimizer = optimizer
        if isinstance(optimizer.state, UserDict):  # of the steps before these
            optimizer.state = optimizer.state.copy()
        self._parameters = {id(one): one for one in parameters_of(optimizer)}
        """By id, those that it has when it is attached."""
        self._places = [*self._parameters]

    @abstractmethod
    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        """Has the weights be those of this step for whoever reads them from now on; returns what
        the closure returns."""

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clips the step by the norm of its gradients, which is returned. `error_if_nonfinite`:
        raises RuntimeError if that is not finite."""
        return torch.nn.utils.clip_grad_norm_(
            parameters_of(self._optimizer), max_norm, error_if_nonfinite=error_if_nonfinite
        )

    def skip(self, drops: bool) -> torch.Tensor:
        """Has no weight change by the step if any worker's `drops` is true; returns whether
        any's is, which may be known after the step."""
        drops = bool(self.sum(int(drops)))
        self._skips |= drops
        return torch.tensor(drops)

    def _takes_skip(self) -> bool:
        """Whether the step that ends is skipped."""
        skips, self._skips = self._skips, False
        return skips

    def trains(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the optimizer has these parameters and no others, but frozen ones."""
        if {*map(id, parameters)} == {*self._parameters}:  # nearly always, and each step asks
            return True
        own = {at for at, one in self._parameters.items() if one.requires_grad}
        return own == {id(one) for one in parameters if one.requires_grad}

    def _give_way(self, other: Steps) -> None:
        """Has the optimizer make its steps by others from now on."""
        vars(self._optimizer)["_steps"] = other

    @abstractmethod
    def wait(self) -> None:
        """Waits until all weights and buffers are there."""

    def adds_up(self) -> None:  # noqa: B027
        """Gradients of the next backward passes add up, and do not leave."""

    def settle(self) -> None:
        """As `wait`, also for values that weights are to take in a later step."""
        self.wait()

    def synchronize(self) -> None:
        """Waits until all weights are there, and gives them the servers' own values, if there are
        such."""
        self.wait()

    @abstractmethod
    def weigh(self, weight: float) -> None:
        """Has this process's gradients of the next step count by `weight` in the mean."""

    def joined(self, how: How) -> ContextManager[None]:
        """An epoch in which workers may have different numbers of batches."""
        raise NotSupportedError(
            "opt.join(): by this consistency rule each worker trains by itself, and waits for no "
            "other's batches: leave it out, or use P3KV_CONSISTENCY=bulk_synchronous"
        )

    def shares(self) -> List[float]:
        """By rank, which part of a global batch each worker should take."""
        raise NotSupportedError(
            "opt.shares() needs samples that opt.weigh() has told, and by this consistency rule "
            "there are no weights: use P3KV_CONSISTENCY=bulk_synchronous"
        )

    @abstractmethod
    def sum(self, number: Number) -> Number:
        """The sum of all workers' numbers."""

    def exchange(self) -> None:
        """Has all workers' weights, and the servers', be the mean of all workers'."""
        self.synchronize()

    @abstractmethod
    def stop(self) -> None:
        """Waits for all values; other steps train the parameters from now on."""

    def check_added(self, parameters: Any) -> None:
        """Raises NotSupportedError where no parameters may be added."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        given = [one[1] if isinstance(one, tuple) else one for one in parameters]
        raise NotSupportedError(
            f"{self._called(given)} can't be added after "
            "p3kv.torch.Optimizer is made: give it all parameters before, those that are frozen at "
            "first, too, or call p3kv.torch.Optimizer(model, optimizer) once more"
        )

    def added(self) -> None:  # noqa: B027
        """The optimizer has more parameters."""

    def _check_groups(self, may_have_fewer: bool = False) -> None:
        """Raises NotSupportedError where the optimizer has other parameters than when it was
        attached."""
        every = parameters_of(self._optimizer)
        if [*map(id, every)] == self._places:  # nearly always, and each step asks
            return
        now = {id(one): one for one in every}
        more = [one for at, one in now.items() if at not in self._parameters]
        fewer = [one for at, one in self._parameters.items() if at not in now]
        if more:
            raise NotSupportedError(
                f"{self._called(more)} can't come into the optimizer's param_groups by themselves: "
                "call opt.add_param_group() after a step, or p3kv.torch.Optimizer(model, optimizer)"
                " once more"
            )
        if fewer and not may_have_fewer:
            raise NotSupportedError(
                f"{self._called(fewer)} can't be taken from the optimizer's param_groups: freeze "
                "by requires_grad_(False), or set P3KV_UPDATES=workers"
            )

    def _called(self, parameters: Sequence[torch.Tensor]) -> str:
        modules = () if self._model is None else self._model.named_parameters()
        names = {id(one): own_name(name) for name, one in modules}
        return ", ".join(
            f"'{names[id(one)]}'" if id(one) in names else f"a parameter of {tuple(one.shape)}"
            for one in parameters
        )

    def check_load(self) -> None:  # noqa: B027
        """Raises NotSupportedError where states can't be loaded."""

    def states_loaded(self, state_dict: Dict[str, Any]) -> None:  # noqa: B027
        """Goes on from the states that the script's optimizer has taken from a `state_dict`."""

    @property
    def takes_scaled_gradients(self) -> bool:
        """Whether `step` unscales what torch's GradScaler has scaled, and not the scaler, as most
        optimizers have it."""
        return bool(vars(self._optimizer).get("_step_supports_amp_scaling"))


class CommonSteps(Steps):
    """Makes steps by the gradients of all workers, which wait for each other in each."""

    def __init__(
        self,
        model: Optional[torch.nn.Module],
        optimizer: torch.optim.Optimizer,
        own: WorkerStore,
        worker: Worker,
    ) -> None:
        super().__init__(model, optimizer)
        self._own, self._worker = own, worker
        self.number = own.number
        """In the order in which each worker makes its optimizers."""
        self._pace = Pace(worker)
        self._weighs = False
        """Whether the script has weighed steps."""
        self._attendance: Optional[Attendance] = None
        """Who takes part, where the script has told of an epoch."""
        self._joined: Optional[How] = None
        """Of an epoch in which workers may have different numbers of batches."""

    def begin_pass(self, roots: Sequence[Any]) -> None:
        """A backward pass from `roots` begins, of these or of other steps."""

    @abstractmethod
    def finish(self) -> None:
        """A backward pass has ended, of these or of other steps."""

    def shares(self) -> List[float]:
        return self._pace.shares()

    def sum(self, number: Number) -> Number:
        (total,) = self._worker.sums((number,))
        return total

    def joined(self, how: How) -> ContextManager[None]:
        attached: Any = self._optimizer
        return joined(attached, how)

    @property
    def attendance(self) -> Attendance:
        assert self._attendance is not None
        return self._attendance

    def begin_epoch(self, how: How) -> None:
        if self._own.own_rounds:
            raise NotSupportedError(
                "opt.join() waits for the workers that have batches, and by this consistency rule "
                "no worker waits for others: leave it out"
            )
        if self._weighs and how.counts_absent:
            self._refuse_count()
        if not how.counts_absent:
            self._own.combine({Feature.WEIGHTS}, "opt.join(divide_by_initial_world_size=False)")
        if self._attendance is None:
            self._attendance = Attendance(self._worker, self._own)
        self._joined = how

    def end_epoch(self, is_over: bool) -> None:
        self._joined = None

    def _check_between(self) -> None:
        """Raises NotSupportedError in an epoch, in which parameters can't be added."""
        if self._joined is not None:
            raise NotSupportedError(
                "opt.add_param_group() was called inside of opt.join(), where a worker without "
                "batches does not call it: call it between epochs"
            )

    def _check_weighs(self) -> None:
        """To be called where the script weighs a step."""
        if self._joined is not None and self._joined.counts_absent:
            self._refuse_count()
        if not self._weighs:
            self._own.combine({Feature.WEIGHTS}, "opt.weigh()")
            self._weighs = True

    @staticmethod
    def _refuse_count() -> NoReturn:
        raise ConfigError(
            "opt.weigh() says how many samples a worker has, and opt.join() would count one "
            "without batches as 1 sample: use opt.join(divide_by_initial_world_size=False)"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> List[torch.nn.Parameter]:
    """All parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def own_step(optimizer: torch.optim.Optimizer, closure: Optional[Callable[[], Any]]) -> Any:
    """Makes a step as the script's optimizer does, without the hooks that run around p3kv's."""
    step = class_of(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    more, named = vars(optimizer).pop("_arguments", ((), {}))
    given = (closure, *more) if more or closure is not None else ()
    vars(optimizer)["_makes_own"] = True
    try:
        return step(optimizer, *given, **named)
    finally:
        del vars(optimizer)["_makes_own"]


def evaluated(closure: Optional[Callable[[], Any]]) -> Any:
    """What a closure returns that is called with gradients; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
