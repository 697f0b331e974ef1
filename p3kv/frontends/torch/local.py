"""Workers that train by themselves, and exchange what they have learned in turn."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence
from weakref import ReferenceType, ref

import torch

from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of
from p3kv.frontends.torch.shared_model import SharedModel
from p3kv.frontends.torch.steps import Steps, evaluated, own_step
from p3kv.frontends.torch.trained import copied, go_on
from p3kv.frontends.torch.values.late import Late
from p3kv.store.outer import set_outer_optimizer
from p3kv.store.turns import Progress
from p3kv.worker.saving.cuts import Trained
from p3kv.worker.stores import WorkerStore

_OF_SCALER = ("grad_scale", "found_inf")
"""Attributes by which GradScaler tells an optimizer that it has scaled gradients."""


class _Weight(NamedTuple):
    late: Late
    progress: Progress


class LocalSteps(Steps):
    """Makes steps by the script's own optimizer, on this worker. When it is a parameter's turn, its
    difference from the servers' last value leaves, and the weight takes the value that comes some
    steps later, always after the same one: numbers do not depend on when values arrive."""

    takes_scaled_gradients = True  # a step must count though the scaler skips its update

    def __init__(
        self,
        own: WorkerStore,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str],
    ) -> None:
        """`buffers` as in `SharedModel`.

        Raises NotSupportedError for a parameter or a buffer that can't be shared.
        """
        super().__init__(model, optimizer)
        self._own = own
        rule = own.rule.local
        assert rule is not None
        shared = self._shared = SharedModel(own, model, optimizer, buffers, whole=False, sparse={})
        exchange = self._exchange = shared.exchange
        every, workers = shared.every, shared.worker.num_workers
        schedule = self._schedule = set_outer_optimizer(
            own, shared.resuming, lambda: class_of(optimizer).__name__
        )
        self._parts = workers if rule.adds else 1
        """What this worker's optimizer does counts with one of so many parts."""
        sizes = [(late.key.key, late.key.size_bytes) for late in every]
        self._weights = [_Weight(late, schedule.of(late.key.key, sizes)) for late in every]
        shared.begin(self)
        for late in every:
            late.key.goes_on = True
        self._before: Optional[List[Trained]] = None
        """What `_copied` gives, before `synchronize` after the newest step."""
        self._go_on()
        own.keep_trained(self._copied)
        self._hooks = [
            late.parameter.register_post_accumulate_grad_hook(
                partial(_ready, ref(exchange), ref(late))
            )
            for late in every
            if late.parameter.requires_grad
        ]
        """For the first step, which tells the forward order."""

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        self._shared.check()
        self._check_groups()
        self._before = None
        self._shared.pushes.begin_own_step()
        loss = self._update(closure)
        for late, progress in self._weights:
            due = progress.step()
            if due.takes_before:
                _take_from_now_on(late)
            if due.sends:
                self._exchange.push_difference(late)
                if due.takes_now:
                    _take_from_now_on(late)
                else:
                    late.as_sent = late.parameter.detach().clone()
        self._exchange.end_step(self._shared.every)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return loss

    def _update(self, closure: Optional[Callable[[], Any]]) -> Any:
        """Has the script's optimizer update the weights; returns what the closure returns."""
        loss = None
        if self._parts > 1:  # the closure's gradients are of the weights as they are
            loss, closure = evaluated(closure), None
        # GradScaler sets both. It skips the update where some gradients are infinite. An optimizer
        # that is fused would unscale once more.
        attributes = vars(self._optimizer)
        its = {name: attributes.pop(name) for name in _OF_SCALER if name in attributes}
        scale, skips = map(its.get, _OF_SCALER)
        try:
            if skips:
                return loss
            updated = [late for late, _ in self._weights if late.parameter.grad is not None]
            for late in updated:
                self._exchange.sees_reads(late)
                late.take()
                if scale is not None:
                    late.parameter.grad.div_(scale.to(late.device))
            self._multiply_learned(updated, self._parts)
            returned = own_step(self._optimizer, closure)
            self._multiply_learned(updated, 1 / self._parts)
            return returned if self._parts == 1 else loss
        finally:
            attributes.update(its)

    def _multiply_learned(self, updated: Sequence[Late], by: float) -> None:
        """Multiplies by how much weights differ from the servers' values. Where changes add up, the
        optimizer updates the weights that there would be if all workers had learned the same: so
        weight decay and Adam's steps count once, and not once for each worker."""
        if self._parts == 1:
            return
        for late in updated:
            value = late.copies.to_device(late.staging)
            late.parameter.data.sub_(value).mul_(by).add_(value)

    def wait(self) -> None:
        self._shared.wait()

    def settle(self) -> None:
        """Has all weights take the values for which they have sent differences."""
        for late, progress in self._weights:
            if progress.awaits:
                progress.settle()
                _take_from_now_on(late)
            late.take()
        self.wait()

    def synchronize(self) -> None:
        if self._own.may_end_in_cut:  # a job that goes on has not synchronised
            self._before = self._copied()
        if self._shared.worker.rank == 0:
            self._schedule.tell_unsent()
        self.settle()
        self._shared.pull()

    def exchange(self) -> None:
        self._shared.check()
        self._shared.worker.barrier("to exchange what they have learned")
        self._before = None
        self.settle()
        self._shared.pushes.begin_exchange()
        with self._schedule.averaging():
            for late, progress in self._weights:
                self._exchange.push_difference(late)
                progress.exchanged()
                _take_from_now_on(late)
        self.wait()
        self._shared.pull()

    def stop(self) -> None:
        self.settle()
        self._own.keep_trained(list)  # nothing more
        self._shared.stop()

    def _copied(self) -> List[Trained]:
        """Copies for a checkpoint of what this worker has."""
        if self._before is not None:
            return self._before
        states: Dict[Any, Any] = self._optimizer.state
        return [
            copied(late, progress, states.get(late.parameter)) for late, progress in self._weights
        ]

    def _go_on(self) -> None:
        """Has this worker have what it had at the checkpoint from which the job goes on."""
        for late, progress in self._weights:
            saved = self._own.own_trained(late.key.key)
            if saved is not None:
                state = go_on(late, progress, saved.numbers, saved.arrays)
                self._optimizer.state.pop(late.parameter, None)
                if state is not None:
                    self._optimizer.state[late.parameter] = state


def _take_from_now_on(late: Late) -> None:
    """Has whoever reads the weight wait for its value."""
    late.key.value_is_due()
    torch.autograd.graph.increment_version(late.parameter)
    late.arm()


def _ready(
    exchange: ReferenceType[Exchange], late: ReferenceType[Late], parameter: torch.Tensor
) -> None:
    of_all, one = exchange(), late()
    if of_all is not None and one is not None:
        of_all.note_order(one)
