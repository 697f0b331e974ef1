"""Steps that servers make: gradients leave during `backward`, and new weights come."""

from __future__ import annotations

import logging
import math
import threading
from contextlib import suppress
from functools import partial
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
)
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, ref

import torch
from torch.amp.grad_scaler import GradScaler

from p3kv.common.combinations import Feature
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.averages import AverageSteps, Gradients, check_sums
from p3kv.frontends.torch.changes import WRITES, Changes
from p3kv.frontends.torch.clipping import NOT_FINITE, Clipping, LateOverflow
from p3kv.frontends.torch.exchange import refuse_second
from p3kv.frontends.torch.hooks import Hooks
from p3kv.frontends.torch.joining import How
from p3kv.frontends.torch.means import Means
from p3kv.frontends.torch.optimizers.optimizer_settings import needs_whole
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.optimizers.server_states import ServerStates
from p3kv.frontends.torch.optimizers.states import rounded, unrounded
from p3kv.frontends.torch.passes import (
    CalledPasses,
    Passes,
    is_reached,
    tell_no_more,
    tell_of_passes,
)
from p3kv.frontends.torch.refusals import check_all_stay
from p3kv.frontends.torch.rows import check_rows, sparse_weights
from p3kv.frontends.torch.shared_model import SharedModel
from p3kv.frontends.torch.steps import CommonSteps, evaluated, parameters_of
from p3kv.frontends.torch.values.asleep import Asleep
from p3kv.frontends.torch.values.leaving import ZEROES, Leaving, Own, Past, end_past
from p3kv.frontends.torch.values.watched import told_of_collectives, watcher_of
from p3kv.frontends.torch.values.written import copied, is_written
from p3kv.store.checks import check_optimizer
from p3kv.store.client import Client
from p3kv.worker.saving.cuts import Unpushed

_log = logging.getLogger("p3kv")
_READ_NOTHING = {*ZEROES, "detach_", "requires_grad_"}
"""Functions by which scripts zero a gradient."""


_SCALED_BY: WeakKeyDictionary[GradScaler, WeakSet[ServerSteps]] = WeakKeyDictionary()


class Unscaling(NamedTuple):
    """A scaler's call for the first step; as in `ServerSteps.unscale`."""

    factor: float
    by_torch: Callable[[], Mapping[Any, torch.Tensor]]
    overflow: LateOverflow


class ServerSteps(CommonSteps):
    """Has each gradient leave when it is complete, and servers update the weights by the script's
    optimizer and the mean of all workers' gradients."""

    updates = "servers"
    scaled = 0
    """How many losses GradScalers of this process have scaled."""
    moving = 0
    """How many modules are moved or converted now, and their gradients with them."""
    made = 0
    """How many steps all of this process have made."""

    def __init__(
        self,
        client: Client[TorchScriptOptimizer],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str],
        passes: Passes,
        may_give_way: bool,
        expects_means: bool,
    ) -> None:
        """`buffers` as in `SharedModel`. `may_give_way`: workers update the weights
        (`AverageSteps`) if the script uses gradients between `backward` and `step`, in its first
        step, and where servers keep means, which they do if they can, in later ones.
        `expects_means`: the script takes gradients for means in any case.

        Raises NotSupportedError for an optimizer, a parameter or a buffer that can't be shared.
        """
        super().__init__(model, optimizer, client.own, client.worker)
        own, worker = client.own, client.worker
        self._client, self.passes = client, passes
        self._whole = needs_whole(optimizer)
        """Whether servers update whole tensors, and not slices."""
        sparse = sparse_weights(model, optimizer)
        check_rows(optimizer, sparse)
        if own.codec_applies_momentum and optimizer.state:
            own.combine({Feature.STATES}, "the optimizer has trained before")
        keeps_means = expects_means or (may_give_way and not sparse)
        shared = self._shared = SharedModel(
            client, model, optimizer, buffers, self._whole, sparse, keeps_means=keeps_means
        )
        self._all_left = False
        """Whether no more gradients of the step leave."""
        self._becoming = threading.Lock()
        """Held while gradients become means, of which any thread may read."""
        self._of = shared.of_parameter
        self._exchange = shared.exchange
        self._pushes = shared.pushes
        self._gives_way = may_give_way and self._may_give_way()
        self._keeps_means = all(one.key.declared.keeps_means for one in shared.buckets)
        """Whether servers keep all means of the last step, and the states before it."""
        expects_means |= self._gives_way and self._keeps_means
        self._expects_means = expects_means and worker.num_workers > 1
        """Whether this worker's own gradient becomes the mean before the script uses it."""
        self._clipping = Clipping(
            own, self._pushes.clipping, worker.num_workers, worker.barrier, self._gives_way,
            [one.dtype for one in shared.every],
        )  # fmt: skip
        self._means = Means(own, self._exchange, self._clipping, self._of)
        self._script_optimizer = TorchScriptOptimizer(
            optimizer,
            {at: weight.key.key for at, (_, weight) in self._of.items()},
            self._pushes.step,
            worker.num_workers,
            own.codec_applies_momentum,
            sparse,
        )
        self._changes = Changes(optimizer, self._exchange, self._of)
        self._undecided: Optional[Gradients] = None
        """While the first step has not shown who updates the weights: what tells it of all
        workers."""
        if self._gives_way:
            check_optimizer(own, self._script_optimizer, None)
            self._undecided = Gradients(worker, own, shared.every)
        else:
            shared.resuming.set_optimizer(self._script_optimizer)
        self._hooks = Hooks(shared.buckets, self._ready)
        tell_of_passes(self)
        self._unscaled = ServerSteps.scaled
        """That number when gradients were known to be of no scaled loss."""
        self._unscaling: Optional[Unscaling] = None
        """In the first step, before it is decided who updates the weights: what unscales them."""
        self._scaler: Callable[[], Optional[GradScaler]] = lambda: None
        """That of the script's losses."""
        self._overflow: Optional[LateOverflow] = None
        """Of a step that this worker has made absent, until the scaler knows of it."""
        self._rates: List[Any] = []
        """This worker's own, in the last step of a joined epoch in which worker 0 had a batch, or
        else in the first."""
        self._has_left = False
        """Whether gradients of a step have left, and it has not ended."""
        self._made_then = 0
        """`ServerSteps.made` when the newest gradient came."""
        self._steps_next = True
        """Whether no other optimizer has stepped between this one's passes and its steps, and so
        each step may begin before the script says so, also where a checkpoint may be due."""
        if self._expects_means or self.may_change:
            self._exchange.on_use = WeakMethod(self._used)
        self._beginning = threading.Lock()
        """Backward passes have a thread for each device."""
        self._states = ServerStates(optimizer, own, self._of, self._whole, self._come_to_rest)
        """The optimizer's `state`, once the servers have those with which it is attached."""
        shared.begin(self)
        self._states.begin()
        if worker.rank == 0:
            own.unpushed = self._frozen
        self._hooks.add()

    def _ready(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: torch's hook, in the thread that runs `backward`."""
        if parameter.grad is None or self._exchange.leaves_out:
            return
        leaves, may_leave = self.passes.reached(parameter)
        self._made_then = ServerSteps.made
        bucket, weight = self._of[id(parameter)]
        end_past(parameter.grad)
        if self._undecided is not None:
            self._changes.first_gradient_comes()
        self._changes.unsee(weight)
        if not leaves:
            if may_leave:
                self._changes.see(bucket, weight)
            return
        if bucket.pushed or weight.leaving is not None:
            why = "the script makes several backward passes"
            steps = self._decided(why, False)
            if steps is None and self._are_own:
                steps = self._taken_back(f"{why} before a step, or leaves out a step")
            if steps is not None:
                steps.ready(parameter)
                return
            refuse_second(weight)
        new = bucket.new() if bucket.is_lean else ()
        self._exchange.note(bucket, new if weight in new else (weight,))
        is_complete = bucket.is_complete
        if is_complete:
            bucket.complete_with(weight)
        if self._clipping.is_known and not self._own.waits_for_cut:
            self._begin()
            if is_complete:
                self._exchange.push(bucket)

    def _may_give_way(self) -> bool:
        """Whether workers could update the weights."""
        if any(bucket.is_table for bucket in self._shared.buckets):
            return False
        try:
            check_sums(self._client, self._shared)
        except NotSupportedError:
            return False
        return True

    def _used(self, own: Own, function: str) -> bool:
        """The script is about to use a gradient; returns whether that is no way to the servers any
        more. A hook inside `backward` sees a worker's own gradient, as with
        DistributedDataParallel. Once servers update the weights, it becomes the mean that they
        keep.

        Raises NotSupportedError where they keep none."""
        if torch._C._current_graph_task_id() != -1 or ServerSteps.moving:
            return False
        if self.passes.are_local:
            return False  # as with DistributedDataParallel
        if self.may_change:
            return self._decided("the script uses gradients between backward and step") is not None
        if self._expects_means and function not in _READ_NOTHING:
            with self._becoming, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                why = self._becomes_mean(own)
            if why:
                raise NotSupportedError(
                    f"the script uses the gradient of '{own.weight.name}' ({function}), which is "
                    f"this worker's own, and not the mean of all workers': {why}. Set "
                    "P3KV_UPDATES=workers, by which it is the mean"
                )
            if isinstance(own, Past):
                own.stays()
        return False

    def _becomes_mean(self, own: Own) -> str:
        """Has a gradient be what it is with DistributedDataParallel by now; returns why it can't
        be. Waits for all workers' gradients. Raises NotSupportedError where the script has changed
        it."""
        why = self._means.why_none(own)
        if not why and own.factors is None and own.in_step:
            self._have_all_leave()
        return why or self._means.become(own)

    def _have_all_leave(self) -> None:
        """No more gradients come before the step."""
        if not self._all_left:
            self._changes.check_seen()
            self._begin()
            self._exchange.push_remaining(self._shared.buckets)
            self._all_left = True

    def finish(self) -> None:
        """A backward pass has ended. Other workers may wait for the means before this one is in
        `step`, and this one for them."""
        if vars(self._optimizer)["_steps"] is not self or not isinstance(self.passes, CalledPasses):
            return
        if self.passes.is_awaited and not self._exchange.leaves_out:
            self._see_unhooked()
            if vars(self._optimizer)["_steps"] is not self:
                return
        waits = self._own.waits_for_cut and not self._steps_next
        stays = not self._clipping.is_known or waits or self._exchange.leaves_out
        ends = self.passes.ended() and not stays
        if ends and not all(bucket.pushed for bucket in self._shared.buckets):
            self._have_all_leave()

    def _see_unhooked(self) -> None:
        """No hook has told of the pass that has ended, and gradients may have come all the same: in
        each bucket the parameter that alone has one may be frozen, or left out of the loss."""
        for bucket in self._shared.buckets:
            for weight in bucket.new() if bucket.is_lean else ():
                if not isinstance(watcher_of(weight.parameter.grad), Past):
                    self._ready(weight.parameter)
                    break

    def begin_pass(self, roots: Sequence[Any]) -> None:
        """A backward pass begins. Has workers update the weights from now on, where the script has
        written to one since the last step, has given the optimizer others, or has left out a step
        that it has clipped: as with DistributedDataParallel, all workers do the same."""
        self._hooks.stay_last()
        if not self._has_left and not self._clipping.last_factors:
            self._means.add_up()
        if not self._gives_way or self._joined:
            return
        if vars(self._optimizer)["_steps"] is not self:
            return
        is_uncalled = False
        if isinstance(self.passes, CalledPasses):
            is_uncalled = self.passes.is_uncalled(roots)
            if not self.passes.is_awaited and not is_uncalled:
                return
        if self._has_left or is_uncalled:
            self._begin_second(roots, is_uncalled)
            return
        if self._clipping.last_factors and (self._expects_means or self._keeps_means):
            stay = any(one.parameter.grad is not None for one in self._shared.every)
            if stay and self._may_reach(roots):
                self._have_means()
        if len(parameters_of(self._optimizer)) != len(self._places):
            why = "the script gives the optimizer other parameters"
            self._keep_orphans()
        elif self._exchange.written():
            why = WRITES
        elif not (self.passes.has_passed or self.passes.are_local) and self._changes.are_parts():
            why = "gradients are parts of a larger tensor, by which the script may use them"
        else:
            return
        if not self._may_reach(roots):
            return
        if self.may_change:
            self._decided(why, is_over=False)
        else:
            self._given_way(why)

    def _begin_second(self, roots: Sequence[Any], is_uncalled: bool) -> None:
        """A backward pass begins before the step of the last one, and may add to its gradients: to
        means, as with DistributedDataParallel. `is_uncalled`: what it adds is each worker's own."""
        why = "the script makes several backward passes before a step, or leaves out a step"
        if is_uncalled:
            why = "the script calls backward once more without a forward pass"
        passes = self.passes
        takes_back = self._has_left and self._can_take_back and not passes.adds
        if not takes_back and not (is_uncalled and self.may_change):
            return
        leaving = [one.leaving for one in self._shared.every if one.leaving is not None]
        if passes.adds_up and any(one.change(one.weight.parameter.grad) is None for one in leaving):
            return  # which the script has as its own, and the step is not left out
        left = {at for at, (_, one) in self._of.items() if is_uncalled or one.leaving is not None}
        if not is_reached(left, roots):
            return
        if self.may_change:
            self._decided(why)
            return
        self._means_taken_back(why)
        if isinstance(passes, CalledPasses) and is_uncalled:
            passes.all_came(self._parameters.values())

    def _may_reach(self, roots: Sequence[Any]) -> bool:
        """Whether a backward pass from `roots` may reach the parameters, as models' calls tell it,
        or else what it goes through."""
        return isinstance(self.passes, CalledPasses) or is_reached(self._parameters, roots)

    def _keep_orphans(self) -> None:
        """What the script has taken from the optimizer goes on to have means, as its models'."""
        now = {*map(id, parameters_of(self._optimizer))}
        fewer = [one for at, one in self._parameters.items() if at not in now]
        attached: Any = self._optimizer
        attached._averaged = attached._averaged.with_orphans(fewer)

    def collective_gets(self, tensors: Iterable[Any]) -> None:
        """A collective of the script's may write to tensors, perhaps to memory of weights."""
        with torch._C.DisableTorchFunctionSubclass():
            large = [one for one in tensors if isinstance(one, torch.Tensor) and one.numel() > 1]
            memory = {one.untyped_storage().data_ptr() for one in large}
            for one in self._shared.every if memory else ():
                if not one.is_table and one.parameter.untyped_storage().data_ptr() in memory:
                    one.gave(torch.Tensor.data_ptr, None)

    def _have_means(self) -> None:
        """Has gradients be means that a pass is to add to, or that the script's own optimizer is to
        use, but those that the script has changed; also those that this worker lacks, if it has
        changed none. Raises NotSupportedError where one can't be."""
        with self._becoming, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self._has_left and not self._changes.of_gradients():
                self._have_all_leave()
                self._means.fill()
            for _, weight in self._of.values():
                gradient = weight.parameter.grad
                own = None if gradient is None else weight.leaving or watcher_of(gradient)
                if isinstance(own, Leaving) and own.change(gradient) is not None:
                    continue
                why = self._becomes_mean(own) if isinstance(own, (Leaving, Past)) else ""
                if why and gradient is not None and gradient.any():
                    raise NotSupportedError(
                        f"the gradient of '{weight.name}' was clipped, or the script uses it for "
                        f"the first time, so it is to be the mean, and can't be: {why}. Zero it "
                        "after step(), or set P3KV_UPDATES=workers"
                    )

    def _given_way_if_local(self) -> Optional[AverageSteps]:
        """What makes steps from this one on, if all its passes were in `no_sync`, or there was none
        and the script has set gradients: they are each worker's own, as with
        DistributedDataParallel. None if they are not."""
        is_called = isinstance(self.passes, CalledPasses)  # or what is set leaves in `step`
        if not (is_called and self._gives_way) or self._has_left or self._joined:
            return None
        if self.passes.are_local:
            why = "the script makes a step whose backward passes are all in no_sync"
        elif not self.passes.has_passed and self._changes.are_given():
            why = "the script makes a step with gradients of its own, and without a backward pass"
        elif not (self.passes.has_passed or self.may_change) and self._exchange.written():
            why = WRITES  # which the next pass would have shown
        else:
            return None
        return self._decided(why, is_over=False) if self.may_change else self._given_way(why)

    def _given_way_if_asked(self, why: str = "") -> Optional[AverageSteps]:
        """What makes steps from this one on, by what the script has done before it clips or makes a
        step; None where these go on. `why` has workers update in the first step."""
        steps = self._given_way_if_local()
        if steps is None and self.may_change:
            return self._decided(why or self._changes.of_first_step())
        return steps or self._changed_late()

    def give_way(self, why: str) -> None:
        """Has workers update the weights from now on, where they can: something else than `step` is
        about to use gradients, if there are any, which are means then. All workers do the same."""
        if self._joined or self._given_way_if_local() is not None:
            return
        has_passed = self.passes.has_passed
        if self.may_change:
            self._decided(why, has_passed)
        elif self._has_left:
            self._changed_late(why)
        elif self._gives_way:
            if not has_passed:
                self._have_means()
            steps = self._given_way(why)
            if has_passed:
                steps.exchange_now()

    def _given_way(self, why: str) -> AverageSteps:
        """What makes steps from now on, between two of them: workers update the weights."""
        self._shared.check()
        steps = AverageSteps.renewed(self, self._shared, self.passes, why)
        self._optimizer.state = rounded(self._optimizer.state)
        self._give_way(steps)
        steps.say_why(why)
        return steps

    @property
    def _can_take_back(self) -> bool:
        """Whether what has left of the step need not count: it is held, or can be undone."""
        if not self._gives_way or self._joined is not None:
            return False
        if self._pushes.clipping.clips:
            return self._clipping.can_drop or self._clipping.can_be_voted_down
        return self._keeps_means

    @property
    def _are_own(self) -> bool:
        """Whether a step can be taken back though a pass has added to gradients that have left:
        each is this worker's own, and the script's calls of models tell of the pass."""
        if not self._can_take_back or not (self.passes.adds_plainly or self._clipping.can_drop):
            return False
        return not any(
            one.leaving is not None
            and one.leaving.factors is not None
            and one.leaving.gradient is one.parameter.grad
            for _, one in self._of.values()
        )

    def _taken_back(self, why: str) -> AverageSteps:
        """Has workers update the weights from this step on, of which gradients have left too early:
        servers drop what has left, or have told the states before it. Weights are as they were,
        since values are written when a step ends. All workers find the same."""
        self._exchange.accept_writes()
        with torch._C.DisableTorchFunctionSubclass():
            for _, weight in self._of.values():
                self._changes.unsee(weight)
                if weight.leaving is not None:
                    weight.leaving.is_dropped()
                    weight.leaving = None
            self._exchange.push_remaining([one for one in self._shared.buckets if not one.pushed])
            if self._pushes.clipping.clips:
                self._clipping.drop()
            else:
                self._states.fetch()  # those before
            for bucket in self._shared.buckets:
                if bucket.pushed:
                    bucket.await_dropped()
            self._exchange.end_step()
        self._has_left = False
        return self._given_way(why)

    def _means_taken_back(self, why: str) -> AverageSteps:
        """As `_taken_back`, with gradients that are means, as after a backward pass."""
        self._exchange.accept_writes()
        if not self._has_left:
            self._have_all_leave()
        self._have_means()
        steps = self._taken_back(why)
        steps.has_passed = True
        return steps

    def _changed_late(self, why: str = "") -> Optional[AverageSteps]:
        """What makes steps from this one on where gradients have left, and then the script has set
        a rate for the step, has changed or left out a gradient, or has written to a weight, or by
        `why`; None where it has done none of these. Raises NotSupportedError where it has changed a
        gradient and the step can't be taken back."""
        if not self._can_take_back:
            self._exchange.check_gradients()
            return None
        if self._has_left:
            settings = self._pushes.optimizer
            assert settings is not None
            why = self._changes.of_later_step(settings, self._pushes.clipping.clips) or why
        elif self._exchange.written():
            why = WRITES
        if not why:
            return None
        if self._has_left and self.passes.adds and not self._are_own:
            self._exchange.check_gradients()
            return None
        if self._has_left and self.passes.adds:
            steps = self._taken_back(why)
            steps.exchange_now()
            steps.has_passed = True
            return steps
        return self._means_taken_back(why)

    def check_added(self, parameters: Any) -> None:
        self._shared.check()
        self._check_between()
        if any(bucket.is_table for bucket in self._shared.buckets):
            super().check_added(parameters)
        has_begun = self._has_left or (self.passes.has_passed and not self.may_change)
        if has_begun and not self._can_take_back:
            raise NotSupportedError(
                "opt.add_param_group() was called between backward and step(): call it after step()"
            )

    def added(self) -> None:
        """All parameters are shared anew, as the scheduler and the servers know a store's."""
        if len(parameters_of(self._optimizer)) == len(self._places):
            return
        attached: Any = self._optimizer
        if self._has_left:
            self._means_taken_back("the script adds parameters before a step, or leaves out a step")
        elif self.may_change and self.passes.has_passed:
            self._decided("the script adds parameters before its first step")
        if attached._steps is not self:
            attached._steps.added()
            return
        if self._expects_means:
            self._have_means()  # or servers would forget those of gradients that stay
        attached.share_anew()
        attached._steps._pace = self._pace
        if self._exchange.weight != 1.0:
            attached._steps.weigh(self._exchange.weight)

    @property
    def may_change(self) -> bool:
        """Whether workers may update the weights yet."""
        return self._undecided is not None

    def stays(self) -> bool:
        """The step is about to end; returns whether servers update the weights."""
        return self._decided(self._changes.of_first_step() if self.may_change else "") is None

    def _decided(
        self, why: str, is_over: bool = True, is_absent: bool = False
    ) -> Optional[AverageSteps]:
        """Decides, in the first step, who updates the weights: workers do it if `why` says so on
        any of them. Returns what makes steps in place of these then; None where these go on.
        Waits for all workers. `is_over`: the backward pass is, so gradients are to be means.
        `is_absent`: this worker has no batch for it."""
        gradients, self._undecided = self._undecided, None
        if gradients is None:
            return None
        unscaling, self._unscaling = self._unscaling, None
        seen = {id(weight): self._changes.unsee(weight) for _, weight in self._of.values()}
        if not gradients.any_says(bool(why)):
            self._shared.resuming.set_optimizer(self._script_optimizer)
            if not self._expects_means:
                self._exchange.on_use = None
            self._exchange.sees_weights = self._keeps_means
            told_of_collectives.add(self)
            if unscaling is not None:
                self._clipping.unscale(unscaling.factor, unscaling.overflow)
            return None
        self._hooks.remove()
        dropped: List[torch.Tensor] = []
        for _, weight in self._of.values():
            leaving, weight.leaving = weight.leaving or seen[id(weight)], None
            if leaving is not None:
                leaving.stays()
                if is_over and weight.parameter.grad is None:  # other workers may have kept theirs
                    weight.parameter.grad = leaving.gradient
                    dropped.append(weight.parameter)
        if any(bucket.by_rows for bucket in self._shared.buckets):  # which sums have otherwise
            steps = AverageSteps.renewed(self, self._shared, self.passes)
        else:
            steps = AverageSteps(
                self._client, self._model, self._optimizer, self._shared, gradients, self.passes
            )
            self._shared.belong_to(steps)
            steps._attendance = self._attendance
        self._give_way(steps)
        steps.say_why(why or "another worker's script uses gradients between backward and step")
        if self._exchange.weight != 1.0:
            steps.weigh(self._exchange.weight)
        if self._joined is not None:
            steps.begin_epoch(self._joined)
        if is_absent:
            steps.say_absent()
            steps.step_absent()
        elif is_over:
            steps.exchange_now()
            for parameter in dropped:
                parameter.grad = None
            if unscaling is not None:
                found = torch.stack([one.cpu() for one in unscaling.by_torch().values()])
                unscaling.overflow.is_now(math.inf if found.any() else 0.0)
        return steps

    def clips_by_torch(self, norm_type: float) -> bool:
        """Whether the script's clipping is torch's, of gradients that are means: in the first step
        by another norm, and where it comes for the first time in a later one."""
        if self.may_change:
            return float(norm_type) != 2
        is_late = self._clipping.is_known and not self._pushes.clipping.clips
        return is_late and (self._expects_means or self._can_take_back)

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        self._shared.check()
        is_scaled = self._unscaled != ServerSteps.scaled
        if self._clipping.is_clipped:
            steps = self._changed_late("the script clips a step more than once")
        else:
            why = "the script clips scaled gradients" if is_scaled else ""
            steps = self._given_way_if_asked(why)
        if steps is not None:
            return steps.clip(max_norm, error_if_nonfinite)
        check_all_stay(self._worker.settings, "a step that is clipped by the mean gradient's norm")
        self._clipping.begin_clip(error_if_nonfinite)
        self._have_all_leave()
        norm = self._clipping.clip(max_norm, error_if_nonfinite)
        if error_if_nonfinite:
            norm.take()
            if not norm.tensor.isfinite():
                self._end_step()
                raise RuntimeError(NOT_FINITE)
        return norm.tensor

    def skip(self, drops: bool) -> torch.Tensor:
        self._shared.check()
        steps = self._decided("")
        if steps is not None:
            return steps.skip(drops)
        check_all_stay(self._worker.settings, "a step that any worker may have skipped")
        return self._clipping.skip(drops)

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        loss = evaluated(closure)
        steps = vars(self._optimizer)["_steps"]
        if steps is self:
            self._shared.check()
            steps = self._given_way_if_asked()
        if steps is not None:  # since the closure, or from now on
            steps.step(None)
        else:
            self._end_step()
        return loss

    def _end_step(self, is_absent: bool = False) -> None:
        """`is_absent`: this worker has no batch, and so no gradient."""
        self._check_groups()
        self._changes.check_seen()
        self._steps_next &= self._made_then == ServerSteps.made
        ServerSteps.made += 1
        self._begin(is_absent)
        self._exchange.push_remaining(self._shared.buckets)
        self._exchange.check_kept(self._can_take_back)
        if is_absent:
            self._clipping.clip_as_before()
        self._clipping.end_step()
        self._check_settings()
        pushed = [bucket for bucket in self._shared.buckets if bucket.pushed]
        torch.autograd.graph.increment_version(
            [weight.parameter for bucket in pushed for weight in bucket.weights]
        )
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in pushed:
                bucket.step_ends()
                self._hooks.step_ends(bucket)
                bucket.arm()
        self._shared.push_buffers(None if self._joined is None else self._attendance)
        if self._joined is not None and not is_absent:
            self._compare_rates()
        self._exchange.end_step()
        self._has_left = self._all_left = False
        self._unscaled = ServerSteps.scaled
        self._pace.step_ended()
        self._states.step_ends()

    def _compare_rates(self) -> None:
        """Warns where this worker's rates change while worker 0, whose rates count, is absent."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        if not self._rates or 0 in self.attendance.present():
            self._rates = rates
        elif rates != self._rates:
            self._rates = rates
            _log.warning(
                "worker 0, whose learning rates count, has no batch left in this epoch, and this "
                "worker's rates change: step schedulers once in an epoch, give worker 0 the most "
                "batches, or set P3KV_UPDATES=workers, by which each worker's rates are its own"
            )

    @property
    def asleep(self) -> Asleep:
        return self._exchange.asleep

    def begin_epoch(self, how: How) -> None:
        self._rates = []
        self._shared.check()
        super().begin_epoch(how)

    def say_absent(self) -> None:
        steps = self._decided("", is_absent=True)
        if steps is not None:
            steps.say_absent()
        else:
            self.attendance.say(self._pushes.step, False)

    def step_absent(self) -> None:
        assert self._joined is not None
        self._exchange.weigh(1.0 if self._joined.counts_absent else 0.0, adds=False)
        self._shared.check()
        self._update_scale()
        scaler = self._scaler()
        if scaler is not None:
            assert scaler._scale is not None
            factor = float(scaler._scale.double().reciprocal().float())
            self._overflow = LateOverflow()
            self._clipping.unscale(factor, self._overflow)
        self._end_step(is_absent=True)

    def end_epoch(self, is_over: bool) -> None:
        super().end_epoch(is_over)
        if is_over:
            self._update_scale()

    def _update_scale(self) -> None:
        """Has the scaler be as the others' scripts leave theirs after the last step that this
        worker has made absent. Not at once, since this waits: workers may come to the steps of
        several optimizers in different orders."""
        overflow, self._overflow = self._overflow, None
        scaler = self._scaler()
        if overflow is None or scaler is None:
            return
        assert scaler._scale is not None
        state = scaler._per_optimizer_states[id(self._optimizer)]
        state["found_inf_per_device"] = {scaler._scale.device: overflow.tensor}
        scaler.update()

    def _begin(self, is_absent: bool = False) -> None:
        """To be called before gradients leave: the servers get what the script has changed in the
        optimizer's state."""
        if self._has_left:
            return
        with self._beginning:
            if self._has_left:
                return
            self._check_groups()
            written = self._states.written()
            if written and self._worker.rank == 0:
                assert self._pushes.optimizer is not None
                self._shared.wait()
                self._states.give(written, self._pushes.optimizer.since_step)
            if self._joined is not None and not is_absent:
                self.attendance.say(self._pushes.step, True)
            self._means.step_begins()
            self._has_left = True
            self.passes.leave()

    def _check_settings(self) -> None:
        """Raises NotSupportedError where the optimizer has changed since gradients left."""
        assert self._pushes.optimizer is not None
        if self._pushes.optimizer.has_changed():
            raise NotSupportedError(
                "the optimizer's param_groups were changed between backward, when the first "
                "gradient left, and step(): change learning rates before backward, or call the "
                "scheduler after step(); or set P3KV_UPDATES=workers"
            )
        written = self._states.written()
        if written:
            raise NotSupportedError(
                f"the optimizer's state of {self._called([*written])} was changed between "
                "backward, when the first gradient left, and step(): change it before backward"
            )

    def adds_up(self) -> None:
        self._hooks.keep_all()

    def wait(self) -> None:
        """Waits for the last norm, too."""
        self._shared.wait()
        self._clipping.wait()

    def synchronize(self) -> None:
        self.wait()
        self._shared.pull()

    def weigh(self, weight: float) -> None:
        self._shared.check()
        self._check_weighs()
        self._exchange.weigh(weight)
        self._pace.samples = weight

    def stop(self) -> None:
        self.wait()
        with suppress(NotSupportedError):
            self._states.fetch()  # the servers forget theirs
        for _, weight in self._of.values():  # uses of their gradients tell these steps
            self._changes.unsee(weight)
            if weight.leaving is not None:
                weight.leaving.stays()
                weight.leaving = None
            elif weight.parameter.grad is not None:
                end_past(weight.parameter.grad)
        self._shared.stop()
        self._hooks.remove()
        tell_no_more(self)

    def _come_to_rest(self) -> None:
        """Waits until servers have made the last step. Raises NotSupportedError where they have
        begun another one, and can't tell the states before it."""
        self._shared.check()
        self._own.combine({Feature.STATES}, "reading the optimizer's state")
        if self._has_left and (self._pushes.clipping.clips or not self._can_take_back):
            raise NotSupportedError(
                "the optimizer's state was read between backward, when the first gradient left, "
                "and step(): read it after step()"
            )
        if not self._has_left:
            self.wait()

    def check_load(self) -> None:
        self._own.combine({Feature.STATES}, "opt.load_state_dict()")
        if not self._has_left:
            return
        if not self._can_take_back:
            raise NotSupportedError(
                "opt.load_state_dict() was called between backward, when the first gradient left, "
                "and step(): call it before backward"
            )
        why = "the script loads the optimizer's state before a step, or leaves out a step"
        self._means_taken_back(why)

    def states_loaded(self, state_dict: Dict[str, Any]) -> None:
        """All workers call it: worker rank 0's count, from the next step on."""
        held = self._optimizer.state
        for parameter, values in unrounded(state_dict, self._optimizer.param_groups):
            held[parameter].update(values)
        self._worker.barrier("to load optimizer states")

    takes_scaled_gradients = False  # the scaler asks `unscale`

    def unscale(
        self, scaler: GradScaler, factor: float, by_torch: Callable[[], Mapping[Any, torch.Tensor]]
    ) -> torch.Tensor:
        """Has servers multiply the gradients of the step by `factor`, and drop it where a sum of
        them is not finite; returns whether one is, 1.0 or 0.0, which is known after the step.
        `by_torch` does so with means that are here, and returns the same by device."""
        self._shared.check()
        check_all_stay(self._worker.settings, "a step of scaled gradients")
        self._scaler = ref(scaler)
        its = _SCALED_BY.setdefault(scaler, WeakSet())
        its.add(self)
        if self._joined is not None and len(its) > 1:
            raise NotSupportedError(
                "a GradScaler of several optimizers was called inside of opt.join(), and a worker "
                "without batches can't know of which its update() would come after: give each "
                "optimizer a GradScaler of its own, or train in bfloat16, which needs no scale"
            )
        every = self._parameters.values()
        if any(one.dtype is torch.float16 and one.grad is not None for one in every):
            raise ValueError("Attempting to unscale FP16 gradients.")  # as torch
        self._unscaled = ServerSteps.scaled
        ask = "the script asks whether gradients have overflowed before step"
        overflow = LateOverflow(partial(self._decided, ask))
        if self.may_change:  # the script may use gradients now
            self._unscaling = Unscaling(factor, by_torch, overflow)
        else:
            self._clipping.unscale(factor, overflow)
        return overflow.tensor

    def _frozen(self) -> List[Unpushed]:
        """Copies for a checkpoint of what servers do not have: frozen weights that the script has
        written to."""
        frozen = (one for one in self._shared.every if not one.parameter.requires_grad)
        return [*(copied(one) for one in frozen if is_written(one)), *self._shared.copied()]
