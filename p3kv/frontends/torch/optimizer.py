"""The optimizer that PyTorch's users see."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Tuple,
    Type,
    Union,
)

import torch
from torch.amp.grad_scaler import GradScaler

from p3kv import config
from p3kv.errors import ConfigError, NotSupportedError, P3Error
from p3kv.frontends.torch.alone import AloneSteps, CopiedSteps, warn_alone
from p3kv.frontends.torch.averaged import Averaged
from p3kv.frontends.torch.averages import AverageSteps
from p3kv.frontends.torch.buffers import push_owed
from p3kv.frontends.torch.clipping import checked
from p3kv.frontends.torch.joining import How
from p3kv.frontends.torch.local import LocalSteps
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of, plain
from p3kv.frontends.torch.optimizers.script_optimizer import TorchGoesOn, TorchScriptOptimizer
from p3kv.frontends.torch.passes import Passes
from p3kv.frontends.torch.refusals import WORKERS, check_arguments, number_of
from p3kv.frontends.torch.rows import check_rows, sparse_weights
from p3kv.frontends.torch.server_steps import ServerSteps
from p3kv.frontends.torch.shared_model import trained_by
from p3kv.frontends.torch.steps import Steps, parameters_of
from p3kv.frontends.torch.trials import TorchTrial
from p3kv.frontends.torch.values.compiled import guard_modules, has_compiler
from p3kv.frontends.torch.values.leaving import end_past
from p3kv.store.client import Client
from p3kv.worker import this_process
from p3kv.worker.measures import nothing_measured


class Optimizer(torch.optim.Optimizer):
    """The script's own optimizer of `torch.optim`, whose updates run on p3kv's servers from now on,
    by the mean of all workers' gradients.

    `p3kv.torch.Optimizer(model, optimizer)` returns `optimizer` itself, whose class is then a
    subclass of this one and of its own: there is one object, whatever name the script calls it by.
    Its groups, hooks and schedulers hold as before. Its `state` is what the servers have: it is
    fetched when the script reads it after a step, also by `state_dict`, and what the script
    writes into it counts from the next step on (worker 0's, as its weights). So does the state
    that it has when it is attached, unless the job goes on from a checkpoint.

    Each gradient leaves as soon as `backward` has computed it, in the order in which the next
    forward pass needs the weights. `step` returns at once. Whoever reads a weight then, waits until
    its new value is there: the layers of a network one after the other, but also compiled regions,
    `state_dict`, `deepcopy` or a print. Only what torch does not tell of needs a call of `wait`
    before: `torch.func`, extensions that get a weight without its module, and aliases made before
    `step`, such as `weight.data`.

    One `backward` belongs to one `step`; for several, all but the last are in `no_sync()`, or
    workers update.
    Parameters are floats on the CPU or on a GPU. Those of embeddings with `sparse=True` travel by
    rows. Of parameters in half precision, servers update a copy in float32, by sums of gradients in
    float32, and round it; their states are in float32, and have this copy as `master_param`. In a
    process that belongs to no job, the optimizer does what it did before. By the rule `local` each
    worker updates its own weights between exchanges, and has its own states. A copy (`deepcopy`,
    pickle) has the states of now, and is to be attached before it trains. To be used from one
    thread.
    """

    _steps: Steps
    _trial: Optional[TorchTrial] = None
    """Where `p3kv compare` or `p3kv tune` runs the script, perhaps without p3kv."""
    _place: Tuple[int, int] = (0, 1)
    _resumed_steps = 0
    _expects_means = False
    """Whether the script takes `p.grad` for the mean of all workers'."""
    _averaged = Averaged()
    _scheduled = 0
    """How often schedulers of torch's have stepped, also where that changed no setting."""
    _makes_own = False
    """Whether the script's own step is under way."""
    _arguments: Tuple[Tuple[Any, ...], Dict[str, Any]] = (), {}
    """Those of the script's own step, beside a closure."""
    _has_made = False
    """Whether the step that is called is made already."""
    _passes: Passes
    _asked: Tuple[torch.nn.Module, Optional[str], Optional[str], Optional[str]]
    """With what p3kv is attached."""

    def __new__(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str] = None,
        consistency: Optional[str] = None,
        updates: Optional[str] = None,
    ) -> Optimizer:
        """The script's optimizer, of a class that is this one, too."""
        check_arguments(model, optimizer, buffers, consistency, updates)
        own_step = vars(optimizer).get("step")
        is_called = own_step is None or hasattr(own_step, "_wrapped_by_lr_sched")
        if not is_called and not hasattr(class_of(optimizer).step, "attaches"):
            raise NotSupportedError(
                f"the optimizer's step was replaced by {own_step}, which p3kv.torch.Optimizer "
                "would not call: replace it afterwards"
            )
        try:
            optimizer.__class__ = _attached(cls, class_of(optimizer))
        except TypeError as error:
            raise NotSupportedError(
                f"p3kv.torch.Optimizer can't be attached to {type(optimizer).__name__} ({error}): "
                "use an optimizer of torch.optim"
            ) from None
        attached: Optimizer = optimizer
        return attached

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str] = None,
        consistency: Optional[str] = None,
        updates: Optional[str] = None,
    ) -> None:
        """Sends worker rank 0's parameters and buffers to all workers, and waits for them; all
        workers call it.

        `optimizer` has the parameters, as `torch.optim.AdamW(model.parameters())` makes it. After
        each step all workers have worker 0's buffers of `model`, such as BatchNorm's statistics
        (`buffers="broadcast"`, the default), their mean (`"average"`, of numbers with a fraction),
        or each its own (`"own"`, the default by a consistency rule that lets workers go on without
        each other). `updates`: who updates the weights. `"servers"` do it by the script's optimizer
        while the next forward pass runs. Or `"workers"` do it, each by its own optimizer, whatever
        it is: then every gradient is the mean of all workers' when `backward` returns, as with
        DistributedDataParallel. By default workers do it where servers can't run the optimizer, or
        update a parameter, and from that step on in which the script does to gradients, weights or
        steps what needs it; the log says why. P3KV_UPDATES holds where the argument is left out.
        `consistency` chooses the rule by which these parameters are exchanged, as P3KV_CONSISTENCY
        chooses that of the job's other optimizers: `"delayed:staleness=1"`.

        Raises ConfigError for arguments that are no model and its optimizer, and for a rule that
        there is not; NotSupportedError for a model in DistributedDataParallel or its like, for what
        servers can't update where the arguments say that they do it, or settings need it, and for
        a buffer that can't travel.
        """
        try:
            self.attach(model, buffers, consistency, updates)
        except BaseException:
            if "_steps" not in vars(self):
                self.__class__ = class_of(self)
            raise
        if hasattr(vars(self).get("step"), "_wrapped_by_lr_sched"):
            del self.step  # a scheduler's, which calls the class's of before
        self._patch_step_function()

    def attach(
        self,
        model: torch.nn.Module,
        buffers: Optional[str],
        consistency: Optional[str],
        updates: Optional[str],
    ) -> None:
        """Has the optimizer train its parameters with all workers, as `__init__` says. What has
        trained them before goes on where this raises an error."""
        passes = self._new_passes()
        steps = self._made(passes, model, buffers, consistency, updates)
        if "_passes" in vars(self):
            self._passes.end()
        self._asked = model, buffers, consistency, updates
        self._passes, self._steps = passes, steps

    def _made(
        self,
        passes: Passes,
        model: torch.nn.Module,
        buffers: Optional[str],
        consistency: Optional[str],
        updates: Optional[str],
    ) -> Steps:
        trial = config.trial()
        if trial is not None and self._trial is None:
            self._trial = TorchTrial(trial, model, parameters_of(self), passes)
            self._place = self._trial.place
        if not this_process.joined():
            if trial is None:
                warn_alone()
            return AloneSteps(self, self._trial)
        if has_compiler():
            guard_modules()
        client: Client[TorchScriptOptimizer] = Client("torch", TorchGoesOn, consistency)
        self._place = client.rank, client.num_workers
        own = client.own
        self._resumed_steps = 0 if own.resumed is None else own.resumed.steps
        if self._resumed_steps:  # a scheduler that the script takes through them comes after these
            self._opt_called = True
        settings = client.worker.settings
        updates = updates or settings.updates
        if own.rule.local is not None:
            if updates is not None:
                raise ConfigError(
                    f"updates={updates!r} (P3KV_UPDATES) with the consistency "
                    f"'{consistency or settings.consistency}', by which workers train by "
                    "themselves: leave out updates=, or use another rule"
                )
            return LocalSteps(client, model, self, buffers)
        averages = own.rule.waits_for_each_round and not own.is_saved
        why = _why_servers_can_t(model, self, averages) if updates is None else None
        if updates != WORKERS and why is None:
            may_give_way = updates is None and averages
            return ServerSteps(
                client, model, self, buffers, passes, may_give_way, self._expects_means
            )
        try:
            steps = AverageSteps.attached(client, model, self, buffers, passes)
        except NotSupportedError as error:
            if why is None:
                raise
            raise NotSupportedError(f"{why}, and workers can't do it either: {error}") from None
        if why is not None:
            steps.say_why(why)
        return steps

    @torch._disable_dynamo
    def step(self, closure: Optional[Callable[[], Any]] = None, *more: Any, **named: Any) -> Any:
        """Has the weights be those of this step for whoever reads them from now on; returns at
        once, with what `closure` returns if it is given: it is called first, with gradients. Where
        a class of the script's takes other arguments, its own `step` gets them.

        Raises NotSupportedError where a gradient, or a setting of the optimizer, has changed after
        the first gradient had left.
        """
        if self._makes_own:  # `super(type(self), self).step`, as a script's class has it
            return super(class_of(self), self).step(closure, *more, **named)
        if more or named:  # torch's own take none
            first = (closure,) if more or closure is not None else ()
            signature(class_of(self).step).bind(self, *first, *more, **named)
            self._arguments = more, named
        self._opt_called = True  # as schedulers have it, to see that steps are called before them
        loss = None if self._has_made else self._steps.step(closure)
        self._step_ends()
        return loss

    step._wrapped_by_lr_sched = True  # so they leave it as it is

    def _step_ends(self) -> None:
        """A step is made, or dropped."""
        self._passes.step_ends()
        if self._trial is not None:
            self._trial.end_step(self._steps.wait)

    def step_scaled(self, found_inf: Iterable[torch.Tensor]) -> Any:
        """Has servers make a step for a GradScaler, which is dropped where a number in `found_inf`
        is not 0. Where something of the script's is in the place of `step`, as accelerate has it,
        or follows it by a hook, that is called as by torch: when it is known that the step is
        made."""
        is_own = "step" not in vars(self) or hasattr(self.step, "_wrapped_by_lr_sched")
        if is_own and not (self._optimizer_step_post_hooks and not self._optimizer_step_pre_hooks):
            return self.step()
        self._steps.step(None)
        if any(one.item() for one in found_inf):
            self._step_ends()
            return None
        self._has_made = True
        try:
            return self.step()
        finally:
            self._has_made = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Has the step be clipped so that the norm of the mean of all workers' gradients is at most
        `max_norm`, as `torch.nn.utils.clip_grad_norm_` clips the joined batch's in one process.

        To be called between `backward` and `step`, from the first step on, by all workers; worker
        rank 0's number counts, and may change with each step. math.inf clips nothing, as do steps
        without a call. Returns at once. Whoever reads the norm that it returns waits until the
        gradients of all workers are there. `error_if_nonfinite` waits for it: if the norm is nan or
        infinite, all workers raise torch's RuntimeError, the step is over, and no weight changes.

        Raises ConfigError for a number below 0. Where only servers may update the weights,
        NotSupportedError for another norm than that of type 2, and where the first call comes after
        the first step.
        """
        steps = self._steps
        if (isinstance(steps, ServerSteps) and steps.clips_by_torch(norm_type)) or (
            isinstance(steps, AverageSteps) and float(norm_type) != 2
        ):
            clip = torch.nn.utils.clip_grad_norm_
            return clip(parameters_of(self), max_norm, norm_type, error_if_nonfinite)
        return steps.clip(checked(max_norm, norm_type), bool(error_if_nonfinite))

    def skip_step(self, if_any: Union[bool, torch.Tensor]) -> torch.Tensor:
        """Has all workers skip this step if `if_any` is true on any of them: no weight, no state of
        the optimizer and no count of its steps changes, whatever the gradients are.

        To be called between `backward` and `step`, from the first step on, by all workers, each
        with its own truth: a bool, or a tensor with one element, which is read at once. Of several
        calls in a step, one that is true is enough. The step still ends by `step`. Returns a bool
        tensor of shape () on the CPU, the same on all workers: whether the step is skipped. Whoever
        reads it waits for all workers' steps; it can be read after `step`.

        Raises NotSupportedError where the first call comes after the first step, and where what is
        returned is read before `step`.
        """
        return self._steps.skip(bool(if_any))

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds parameters, as torch's: all workers call it after the same step, and have worker
        rank 0's values of them. They wait for each other, since all is shared anew: in the step
        that follows nothing leaves before `step`, as in the first.

        Raises NotSupportedError in `join`, where workers train by themselves (`local`) or the
        optimizer has a `p3kv.torch.Embedding`, and between `backward` and `step` where only servers
        may update.
        """
        self._steps.check_added(param_group["params"])
        super().add_param_group(param_group)
        try:
            self._steps.added()
        except P3Error:
            del self.param_groups[-1]
            raise

    def share_anew(self) -> None:
        """Has servers update the parameters that there are now."""
        self.attach(*self._asked)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Has gradients add up inside, and not leave: for all backward passes of a step but the
        last."""
        self._steps.adds_up()
        before, self._passes.adds_up = self._passes.adds_up, True
        try:
            yield
        finally:
            self._passes.adds_up = before

    def weigh(self, samples: Any) -> None:
        """Has this worker's gradients of the step that follows count by `samples` in the mean of
        all workers: the update is by sum(samples x gradient) / sum(samples), as one process's with
        the joined batch, where each loss is the mean of its samples. It may count tokens as well.

        To be called before `backward`, on any worker, for each step anew: without a call a worker
        counts by 1. One with 0 adds nothing, also where its gradients are nan. `samples` is a
        number from 0 on, or a tensor of one element.

        Raises ConfigError for another number, NotSupportedError once gradients of the step have
        left, and by rules and codecs by which there is no mean of a step's gradients.
        """
        number = number_of("opt.weigh() takes", samples)
        if not 0 <= number < math.inf:
            raise ConfigError(f"opt.weigh() takes a number of samples from 0 on, not {samples!r}")
        self._steps.weigh(float(number))

    def shares(self) -> List[float]:
        """By rank, which part of a global batch each worker should take so that all compute for
        the same time: by the samples that `weigh` has told, and the time for which each worker's
        script did not wait for the others, as the median of the steps since the last call, and
        smoothed with those before. They sum to 1, and are the same on all workers; equal as long as
        nothing is known. All workers call it, and it waits for all of them.
        """
        return self._steps.shares()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> ContextManager[None]:
        """An epoch in which workers may have different numbers of batches, as
        DistributedDataParallel's `join`: all workers make its steps inside `with
        optimizer.join():`. At its end a worker waits for those that have batches, takes part in
        their steps without a gradient, and has the same weights as they when all are at the end.

        The mean is by the number of all workers, or of those that have a batch for the step if
        `divide_by_initial_world_size` is False. `enable=False` does nothing, and by
        `throw_on_early_termination` the job ends where a worker has fewer batches. Several
        optimizers may have such epochs at once: `with first.join(), second.join():`.

        Raises NotSupportedError by consistency rules by which no worker waits for others, and
        ConfigError where steps are weighed and absent workers are to count.
        """
        if not enable:
            return nullcontext()
        # A worker without batches makes no forward pass, and the last with batches gives buffers.
        push_owed(giver=self.num_workers - 1)
        return self._steps.joined(How(divide_by_initial_world_size, throw_on_early_termination))

    def sum(self, number: Any) -> Union[int, float]:
        """The sum of one number over all workers, such as a loss or a count of samples, the same
        bits on all: numbers are added in the order of ranks. All workers call it, and it waits for
        all of them. Of ints it is an int, unless it has more than 64 bits. Workers that have left
        add nothing; a process alone has its own number.

        `number` is an int of 64 bits at most, a float, or a tensor of one element, which is waited
        for. Raises ConfigError for anything else.
        """
        return self._steps.sum(number_of("opt.sum() takes", number))

    @property
    def rank(self) -> int:
        """The number of this worker, from 0: by it scripts choose their part of the data."""
        return self._place[0]

    @property
    def num_workers(self) -> int:
        """How many workers train together; 1 where this process trains alone."""
        return self._place[1]

    @property
    def updates(self) -> str:
        """Who updates the weights: "servers", or "workers", each by its own optimizer."""
        return self._steps.updates

    @property
    def resumed_steps(self) -> int:
        """How many steps there were before the checkpoint from which the job goes on: the script
        skips their batches. 0 where the job goes on from none."""
        return self._resumed_steps

    def stats(self) -> Dict[str, Any]:
        """Measurements of this worker so far, which docs/measuring.md explains, and who `updates`
        the weights, with `why` workers do it where the script has not said so. Returns at once;
        zeros in a process that belongs to no job."""
        joined = this_process.joined()
        numbers = this_process.worker().stats() if joined else nothing_measured()
        return {**numbers, "updates": self.updates, "why": self._steps.why}

    def wait(self) -> None:
        """Waits until all weights and buffers are there."""
        self._steps.wait()

    def synchronize(self) -> None:
        """Waits until all weights are there, and gives them the servers' own values, unrounded:
        where P3KV_VALUE_CODEC has each worker lack some changes, or rounds."""
        self._steps.synchronize()

    def exchange(self) -> None:
        """Has all workers' weights, and the servers', be the mean of all workers' weights, where
        workers train by themselves (`local`): at the end of a training, before it is evaluated or
        saved. With `bounded` and `lazy=1` they have all that workers have trained. By other rules
        all workers have the same weights anyway, and it is `synchronize`.

        All workers call it, after the same step, and it waits for all of them.
        """
        self._steps.exchange()

    def zero_grad(self, *given: Any, **named: Any) -> None:
        """As torch's (`set_to_none=True`), or as the script's class has it. Where gradients are to
        be zeroed in place, it waits until they have left."""
        if not (given[0] if given else named.get("set_to_none", True)):
            self.wait()
            for parameter in parameters_of(self):
                if parameter.grad is not None:
                    end_past(parameter.grad)
        with torch._C.DisableTorchFunctionSubclass():  # which asks late weights for gradients
            super().zero_grad(*given, **named)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Has the servers go on from a state in torch's own format; all workers call it."""
        self._steps.check_load()
        loaded: Dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, changed: loaded.update(changed))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._steps.states_loaded(loaded)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles."""
        kind = type(self).__mro__[1]
        return (
            _copied,
            (kind, class_of(self), self._place, self._resumed_steps),
            self.__getstate__(),
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks for."""
        return self._steps.takes_scaled_gradients

    @classmethod
    def may_be(cls, kind: Type[torch.optim.Optimizer]) -> bool:
        """Whether an object of the script's class can be of this one, too: not if the first of its
        bases has no `__dict__`, as ABC and Generic have none."""
        try:
            object.__new__(kind).__class__ = _attached(cls, kind)
        except TypeError:
            return False
        return True

    def _new_passes(self) -> Passes:
        """Tells which gradients leave at once."""
        return Passes()


def _why_servers_can_t(
    model: torch.nn.Module, optimizer: Optimizer, averages: bool
) -> Optional[str]:
    """Why servers can't update an optimizer's parameters, where each worker's own can; None where
    they can, as far as the optimizer and the model show. `averages`: whether servers could average
    gradients by the job's settings."""
    try:
        plain(optimizer, {}, 0, 1)
        check_rows(optimizer, sparse_weights(model, optimizer))
    except NotSupportedError as error:
        return str(error)
    every = parameters_of(optimizer)
    dtype = next((one.dtype for one in every if one.is_complex() and one.requires_grad), None)
    if dtype is not None:
        return f"servers can't update parameters of {dtype}"
    return optimizer._averaged.why_servers_cannot() if averages else None


_classes: Dict[Any, Any] = {}


def _attached(kind: Type[Optimizer], script_class: Type[torch.optim.Optimizer]) -> Any:
    """The class of optimizers that the script has made of `script_class`, and attached by
    `kind`."""
    found = _classes.get((kind, script_class))
    if found is None:
        names = {"__module__": kind.__module__, "script_class": script_class}
        found = type(script_class.__name__, (kind, script_class), names)
        _classes[kind, script_class] = found
    return found


def _copied(
    kind: Type[Optimizer],
    script_class: Type[torch.optim.Optimizer],
    place: Tuple[int, int],
    resumed_steps: int,
) -> Optimizer:
    """A copy of an attached optimizer, before it gets its groups and states."""
    copy: Optimizer = object.__new__(_attached(kind, script_class))
    copy.param_groups, copy.state = [], {}  # which come
    copy._steps = CopiedSteps(copy) if this_process.is_worker() else AloneSteps(copy)
    copy._place, copy._resumed_steps = place, resumed_steps
    copy._passes = Passes()
    return copy


def watch_scalers() -> None:
    """Has torch's GradScaler leave gradients to the servers that have them, and always step there:
    they know whether gradients of any worker have overflowed, and drop the step then."""
    scale = GradScaler.scale
    unscale, step = GradScaler._unscale_grads_, GradScaler._maybe_opt_step

    @functools.wraps(scale)
    def scale_and_note(self: Any, outputs: Any) -> Any:
        ServerSteps.scaled += self.is_enabled()
        return scale(self, outputs)

    @functools.wraps(unscale)
    def _unscale_grads_(
        self: Any, optimizer: Any, inv_scale: torch.Tensor, *others: Any, **named: Any
    ) -> Dict[torch.device, torch.Tensor]:
        own = functools.partial(unscale, self, optimizer, inv_scale, *others, **named)
        steps = getattr(optimizer, "_steps", None)
        if isinstance(steps, ServerSteps):
            return {inv_scale.device: steps.unscale(self, float(inv_scale), own)}
        found: Dict[torch.device, torch.Tensor] = own()
        return found

    @functools.wraps(step)
    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *given: Any, **named: Any) -> Any:
        steps = getattr(optimizer, "_steps", None)
        if isinstance(steps, ServerSteps) and steps.stays():
            return optimizer.step_scaled(state["found_inf_per_device"].values())
        return step(self, optimizer, state, *given, **named)

    GradScaler.scale = scale_and_note
    GradScaler._unscale_grads_ = _unscale_grads_
    GradScaler._maybe_opt_step = _maybe_opt_step


def watch_clipping() -> None:
    """Has `torch.nn.utils.clip_grad_norm_` of all parameters that servers update for an optimizer
    be that of the optimizer, and otherwise torch's."""
    clip = torch.nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0,
        error_if_nonfinite: bool = False, foreach: Optional[bool] = None,
    ) -> torch.Tensor:  # fmt: skip
        given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        steps = trained_by(given)
        if isinstance(steps, ServerSteps) and not steps.clips_by_torch(norm_type):
            return steps.clip(checked(max_norm, norm_type), error_if_nonfinite)
        norm: torch.Tensor = clip(given, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm

    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
