"""The optimizer that PyTorch's users see."""

from __future__ import annotations

import atexit
import logging
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np
import torch

from p3kv import config
from p3kv.common.combinations import Feature
from p3kv.errors import ConfigError, NotSupportedError, P3Error
from p3kv.frontends.torch.buffer_places import AVERAGE, HOWS, kept, own_or_shared, places_of
from p3kv.frontends.torch.buffers import Buffers
from p3kv.frontends.torch.clipping import Clipping, checked
from p3kv.frontends.torch.compiled import guard_modules, own_name
from p3kv.frontends.torch.early import EarlyWrites
from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.late import Late
from p3kv.frontends.torch.optimizer_settings import needs_whole
from p3kv.frontends.torch.pushes import pushes_of
from p3kv.frontends.torch.refusals import check_all_stay, check_parameter, check_settings
from p3kv.frontends.torch.rows import LAYOUT, LateRows, check_rows, sparse_weights
from p3kv.frontends.torch.script_optimizer import TorchGoesOn, TorchScriptOptimizer
from p3kv.frontends.torch.states import exported, imported, unrounded
from p3kv.frontends.torch.tensors import DTYPES, tensor_in
from p3kv.frontends.torch.trials import TorchTrial
from p3kv.frontends.torch.written import copied, is_written
from p3kv.server.optimizer import State
from p3kv.store.resuming import Resuming
from p3kv.store.states import give_state, states_of
from p3kv.worker import this_process
from p3kv.worker.cuts import Unpushed

_log = logging.getLogger("p3kv")


class Optimizer(torch.optim.Optimizer):
    """An optimizer of `torch.optim` whose updates run on p3kv's servers, by the mean of all
    workers' gradients.

    Each gradient leaves as soon as `backward` has computed it, in the order in which the next
    forward pass needs the weights. `step` returns at once. Whoever reads a weight then, waits until
    its new value is there: the layers of a network one after the other, but also compiled regions,
    `state_dict`, `deepcopy` or a print. Only what torch does not tell of needs a call of `wait`
    before: scripted modules, `torch.func`, and aliases made before `step`, such as `weight.data`.

    One `backward` belongs to one `step`; for several, all but the last are in `no_sync()`.
    Parameters are floats on the CPU. Those of embeddings with `sparse=True` travel by rows. Of
    parameters in half precision, servers
    update a copy in float32, by sums of gradients in float32, and round it. In a process that
    belongs to no job, the optimizer does what the inner one does. To be used from one thread.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str] = None,
    ) -> None:
        """Sends worker rank 0's parameters and buffers to all workers, and waits for them; all
        workers call it.

        `optimizer` has the parameters, as `torch.optim.AdamW(model.parameters())` makes it. Its
        `param_groups` are this one's, so schedulers may take either. After each step all workers
        have worker 0's buffers of `model`, such as BatchNorm's statistics (`buffers="broadcast"`,
        the default), their mean (`"average"`, of numbers with a fraction), or each its own
        (`"own"`, the default by a consistency rule that lets workers go on without each other).

        Raises NotSupportedError for an optimizer or a parameter that the servers can't update, and
        for a buffer that can't travel.
        """
        self._inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        if buffers not in (None, *HOWS):
            raise ConfigError(f"buffers={buffers!r}: use one of {', '.join(map(repr, HOWS))}")
        self._buffers: Optional[Buffers] = None
        self._made = True
        self._replaced = False
        """Whether another one has its parameters now."""
        self._syncs = True
        self._late: Dict[int, Late] = {}
        """By the parameter's id."""
        self._alone = not this_process.is_worker()
        trial = config.trial()
        self._trial: Optional[TorchTrial] = None
        """Where `p3kv compare` runs the script, perhaps without p3kv."""
        self._place = 0, 1
        if trial is not None:
            parameters = [one for group in self.param_groups for one in group["params"]]
            self._trial = TorchTrial(trial, model, parameters, lambda: self._syncs)
            self._place = self._trial.place
        elif self._alone:
            _log.warning(
                "p3kv: p3kv.torch.Optimizer trains in this process alone, since no launcher has "
                "started it. 'p3kv launch -n 2 -- python train.py' starts two workers."
            )
        if self._alone:
            return
        guard_modules()
        self._worker = this_process.worker()
        if not self._worker.started:
            self._worker.start(config.settle())
        self._place = self._worker.rank, self._worker.num_workers
        self._own = self._worker.new_store()
        check_settings(self._worker.settings, self._own.rule)
        how = own_or_shared(buffers, self._own.rule)
        if how == AVERAGE:
            check_all_stay(self._worker.settings, "the mean of buffers")
        self._pushes = pushes_of(self._own, self._worker.rank)
        self._resuming = Resuming(
            self._own, self._pushes, self._worker.rank, TorchGoesOn(self._own)
        )
        self._whole = needs_whole(optimizer)
        """Whether servers update whole tensors, and not slices."""
        self._sparse = sparse_weights(model, optimizer)
        check_rows(optimizer, self._sparse)
        self._early = EarlyWrites()
        self._clipping = Clipping(
            self._own, self._pushes.clipping, self._worker.num_workers, self._worker.barrier
        )
        self._declare(model)
        self._exchange = Exchange(self._worker, self._own, self._pushes, [*self._late.values()])
        keys = {id(late.parameter): late.key.key for late in self._late.values()}
        self._resuming.set_optimizer(
            TorchScriptOptimizer(
                optimizer,
                keys,
                self._pushes.step,
                self._worker.num_workers,
                self._own.codec_applies_momentum,
                self._sparse,
            )
        )
        places = places_of(model, how)
        self._replace_older()  # nothing refuses this one any more
        self._early.start()
        self._exchange_initial()
        places = [place for place in places if place.where not in kept]
        if places:
            resumes = self._own.resumed is not None
            self._buffers = Buffers(places, how, self._worker, resumes)
        if self._worker.rank == 0:
            self._own.unpushed = self._frozen
        self._hooks = {
            at: late.parameter.register_post_accumulate_grad_hook(self._ready)
            for at, late in self._late.items()
            if late.parameter.requires_grad
        }
        atexit.register(self._finish)

    # What a script calls.

    @torch._disable_dynamo
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Has the weights be those of this step for whoever reads them from now on; returns at
        once, with what `closure` returns if it is given: it is called first, with gradients.

        Raises NotSupportedError where a gradient, or a setting of the optimizer, has changed after
        the first gradient had left.
        """
        if self._alone:
            return self._step_alone(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._worker.check()
        if self._replaced:
            raise NotSupportedError(
                "another p3kv.torch.Optimizer has been made with these parameters: call its step()"
            )
        self._exchange.push_remaining(self._late.values())
        self._clipping.end_step()
        for at, late in self._late.items():
            parameter = late.parameter
            if parameter.requires_grad and at not in self._hooks:  # it has been frozen before
                self._hooks[at] = parameter.register_post_accumulate_grad_hook(self._ready)
        assert self._pushes.optimizer is not None
        if self._pushes.optimizer.has_changed():
            raise NotSupportedError(
                "the optimizer's param_groups were changed between backward, when the first "
                "gradient left, and step(): change learning rates before backward, or call the "
                "scheduler after step()"
            )
        torch.autograd.graph.increment_version([late.parameter for late in self._late.values()])
        for late in self._late.values():
            late.pushed = False
            late.gradient = None
            if late.parameter.requires_grad:
                late.value_version = late.parameter._version
            late.arm()
        if self._buffers is not None:
            self._buffers.push(self._pushes.step)
        self._exchange.end_step([*self._late.values()])
        if self._trial is not None:
            self._trial.end_step(self.wait)
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Has the step be clipped so that the norm of the mean of all workers' gradients is at most
        `max_norm`, as torch.nn.utils.clip_grad_norm_ clips the joined batch's in one process.

        To be called between `backward` and `step`, from the first step on, by all workers; worker
        rank 0's number counts, and may change with each step. math.inf clips nothing, as do steps
        without a call. Returns at once. Whoever reads the norm that it returns waits until the
        gradients of all workers are there.

        Raises ConfigError for a number below 0, NotSupportedError for another norm than that of
        type 2, for `error_if_nonfinite`, and where the first call comes after the first step.
        """
        number = checked(max_norm, norm_type, error_if_nonfinite)
        if self._alone:
            every = [one for group in self.param_groups for one in group["params"]]
            return torch.nn.utils.clip_grad_norm_(every, number)
        self._worker.check()
        check_all_stay(self._worker.settings, "a step that is clipped by the mean gradient's norm")
        self._clipping.begin()
        self._exchange.push_remaining(self._late.values())
        return self._clipping.clip(number)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Refused once the optimizer is made: the servers know its parameters."""
        if getattr(self, "_made", False) and not self._alone:
            raise NotSupportedError(
                "parameters can't be added; make p3kv.torch.Optimizer with all of them, those that "
                "are frozen at first, too"
            )
        super().add_param_group(param_group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Has gradients add up inside, and not leave: for all backward passes of a step but the
        last."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @property
    def rank(self) -> int:
        """The number of this worker, from 0: by it scripts choose their part of the data."""
        return self._place[0]

    @property
    def num_workers(self) -> int:
        """How many workers train together; 1 where this process trains alone."""
        return self._place[1]

    @property
    def resumed_steps(self) -> int:
        """How many steps there were before the checkpoint from which the job goes on: the script
        skips their batches. 0 where the job goes on from none."""
        return 0 if self._alone or self._own.resumed is None else self._own.resumed.steps

    def wait(self) -> None:
        """Waits until all weights and buffers are there."""
        for late in self._late.values():
            late.wait()
        if self._buffers is not None:
            self._buffers.wait()
        if not self._alone:
            self._clipping.wait()

    def synchronize(self) -> None:
        """Waits until all weights are there, and gives them the servers' own values, unrounded:
        where P3KV_VALUE_CODEC has each worker lack some changes, or rounds."""
        self.wait()
        for late in self._late.values():
            if late.parameter.requires_grad or not is_written(late):
                self._exchange.pull(late, exact=True)
                late.arm()
        self.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Where gradients are to be zeroed in place, it waits until they have left."""
        if not set_to_none:
            self.wait()
        super().zero_grad(set_to_none)

    def state_dict(self) -> Dict[str, Any]:
        """The state in torch's own format, which the servers have; waits for all updates.

        That of a parameter in half precision is in float32, and has the servers' copy of the weight
        as `master_param`.
        """
        if not self._alone:
            self._own.combine({Feature.STATES}, "opt.state_dict()")
            self.wait()
            for late in self._late.values():
                states = states_of(self._own, late.key, self._whole)
                if states:
                    self.state[late.parameter] = imported(
                        State.joined(states), None if self._whole else late.parameter.shape
                    )
        return super().state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Has the servers go on from a state in torch's own format; all workers call it."""
        if not self._alone:
            self._own.combine({Feature.STATES}, "opt.load_state_dict()")
        super().load_state_dict(state_dict)
        self._inner.param_groups, self._inner.state = self.param_groups, self.state
        if self._alone:
            return
        for parameter, values in unrounded(state_dict, self.param_groups):
            self.state[parameter].update(values)
        self.wait()
        self._worker.barrier("to load optimizer states")
        if self._worker.rank == 0:
            assert self._pushes.optimizer is not None
            since_step = self._pushes.optimizer.since_step
            for late in self._late.values():
                state = self.state.get(late.parameter)
                given = exported(state, since_step, self._whole) if state else None
                give_state(self._own, late.key, given, self._whole)
        self._worker.barrier("to go on with loaded optimizer states")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks for: refused, since it unscales gradients that have left,
        and a worker knows of its own overflows alone."""
        if self._alone:
            return False  # as most of torch's own: the scaler unscales before `step`
        raise NotSupportedError(
            "GradScaler changes gradients after they have left; train in bfloat16 or float32, "
            "which need no scaling, or give GradScaler(enabled=False)"
        )

    # How it is done.

    def _step_alone(self, closure: Optional[Callable[[], Any]]) -> Any:
        if self._trial is None:
            return self._inner.step(closure)
        loss = self._trial.update(self._inner, closure)
        self._trial.end_step()
        return loss

    def _replace_older(self) -> None:
        """An optimizer that has some of these parameters trains nothing any more."""
        for parameter in (one for group in self.param_groups for one in group["params"]):
            older = _OF_PARAMETER.get(id(parameter))
            if older is not None and older is not self:
                older.wait()
                for late in older._late.values():
                    late.take()
                for hook in older._hooks.values():
                    hook.remove()
                if older._buffers is not None:
                    older._buffers.stop()
                older._replaced = True
            _OF_PARAMETER[id(parameter)] = self

    def _declare(self, model: torch.nn.Module) -> None:
        names = {id(parameter): own_name(name) for name, parameter in model.named_parameters()}
        every = [one for group in self.param_groups for one in group["params"]]
        for at, parameter in enumerate(every):
            name = names.get(id(parameter), f"parameter {at}")
            check_parameter(parameter, name)
            layout = LAYOUT if id(parameter) in self._sparse else "dense"
            key = self._own.declare(
                at, tuple(parameter.shape), DTYPES[parameter.dtype], name, layout, self._whole
            )
            kind = LateRows if id(parameter) in self._sparse else Late
            self._late[id(parameter)] = kind(key, parameter, name, self._early)

    def _exchange_initial(self) -> None:
        for late in self._late.values():
            if self._worker.rank != 0:
                self._exchange.pull(late)
                continue
            saved = self._resuming.initial(late.key)
            if saved is not None:
                value = tensor_in(np.ascontiguousarray(saved))
                late.parameter.data.copy_(value.reshape(late.parameter.shape))
            self._exchange.give_initial(late)
            self._resuming.give_state(late.key)
        for late in self._late.values():
            late.arm()
        self.wait()

    def _frozen(self) -> List[Unpushed]:
        """Copies for a checkpoint of what servers do not have: frozen weights that the script has
        written to."""
        frozen = (one for one in self._late.values() if not one.parameter.requires_grad)
        return [copied(late) for late in frozen if is_written(late)]

    @torch._disable_dynamo
    def _ready(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: torch's hook, in the thread that runs `backward`."""
        if not self._syncs or parameter.grad is None:
            return
        late = self._late[id(parameter)]
        if late.pushed or late.gradient is not None:
            raise NotSupportedError(
                f"the gradient of '{late.name}' has left, and a second backward pass adds to it "
                "before opt.step(): put all backward passes of a step but the last into 'with "
                "opt.no_sync():', and those of other losses that reach the weight. Where a "
                "reentrant checkpoint brings a gradient in parts, put all in, or give "
                "use_reentrant=False"
            )
        self._exchange.note(late)
        if self._clipping.is_known and not self._own.waits_for_cut:
            self._exchange.push(late)

    def _finish(self) -> None:
        """Before the worker leaves: all values come, or the script has failed."""
        if not this_process.give_up_if_script_failed():
            with suppress(P3Error):  # which the worker tells
                self.wait()
        self._early.close()


_OF_PARAMETER: Dict[int, Optimizer] = {}
"""By the parameter's id: which optimizer has it."""
