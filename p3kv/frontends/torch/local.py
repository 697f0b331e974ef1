"""Workers that train by themselves, and exchange what they have learned in turn."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence
from weakref import ReferenceType, ref

import torch

from p3kv.common.combinations import Feature
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.hooks import hooked
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.shared_model import SharedModel
from p3kv.frontends.torch.steps import Number, Steps, evaluated, own_step
from p3kv.frontends.torch.trained import copied, go_on
from p3kv.frontends.torch.values.bucket import Bucket, Weight
from p3kv.store.client import Client
from p3kv.store.outer import set_outer_optimizer
from p3kv.store.turns import Progress
from p3kv.worker.saving.cuts import Trained

_OF_SCALER = ("grad_scale", "found_inf")
"""Attributes by which GradScaler tells an optimizer that it has scaled gradients."""


class _Turn(NamedTuple):
    bucket: Bucket
    weight: Weight
    """Its only one."""
    progress: Progress


class LocalSteps(Steps):
    """Makes steps by the script's own optimizer, on this worker. When it is a parameter's turn, its
    difference from the servers' last value leaves, and the weight takes the value that comes some
    steps later, always after the same one: numbers do not depend on when values arrive."""

    takes_scaled_gradients = True  # a step must count though the scaler skips its update

    def __init__(
        self,
        client: Client[TorchScriptOptimizer],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str],
    ) -> None:
        """`buffers`, and what it raises, as in `SharedModel`."""
        super().__init__(model, optimizer)
        own = self._own = client.own
        rule = own.rule.local
        assert rule is not None
        shared = self._shared = SharedModel(
            client, model, optimizer, buffers, whole=False, sparse={}
        )
        exchange = self._exchange = shared.exchange
        workers = shared.worker.num_workers
        schedule = self._schedule = set_outer_optimizer(
            own, shared.resuming, lambda: class_of(optimizer).__name__
        )
        self._parts = workers if rule.adds else 1
        """What this worker's optimizer does counts with one of so many parts."""
        sizes = [(bucket.key.key, bucket.key.size_bytes) for bucket in shared.buckets]
        self._turns = [
            _Turn(bucket, bucket.weights[0], schedule.of(bucket.key.key, sizes))
            for bucket in shared.buckets
        ]
        shared.begin(self)
        for bucket in shared.buckets:
            bucket.key.goes_on = True
        self._before: Optional[List[Trained]] = None
        """What `_copied` gives, before `synchronize` after the newest step."""
        self._go_on()
        own.keep_trained(self._copied)
        self._hooks = [
            hooked(weight.parameter, partial(_ready, ref(exchange), ref(weight)))
            for weight in shared.every
        ]
        """For the first step, which tells the forward order."""

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        self._shared.check()
        self._check_groups()
        self._before = None
        self._shared.pushes.begin_own_step()
        loss = self._update(closure)
        for bucket, weight, progress in self._turns:
            due = progress.step()
            if due.takes_before:
                _take_from_now_on(bucket)
            if due.sends:
                self._exchange.push_difference(bucket)
                if due.takes_now:
                    _take_from_now_on(bucket)
                else:
                    weight.as_sent = weight.parameter.detach().clone()
        self._exchange.end_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return loss

    def skip(self, drops: bool) -> NoReturn:
        raise NotSupportedError(
            "opt.skip_step has all workers skip a step, and by a rule by which each worker trains "
            "by itself, such as local, none knows what the others do in a step: do not call "
            "opt.step() where this worker's gradients are bad, but opt.zero_grad()"
        )

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
            updated = [one.weight for one in self._turns if one.weight.parameter.grad is not None]
            for bucket, weight, _ in self._turns:
                gradient = weight.parameter.grad
                if gradient is not None:
                    self._exchange.sees_reads(weight)
                    bucket.take()
                    if scale is not None:
                        gradient.div_(scale.to(weight.device))
            self._multiply_learned(updated, self._parts)
            returned = own_step(self._optimizer, closure)
            self._multiply_learned(updated, 1 / self._parts)
            return returned if self._parts == 1 else loss
        finally:
            attributes.update(its)

    def _multiply_learned(self, updated: Sequence[Weight], by: float) -> None:
        """Multiplies by how much weights differ from the servers' values. Where changes add up, the
        optimizer updates the weights that there would be if all workers had learned the same: so
        weight decay and Adam's steps count once, and not once for each worker."""
        if self._parts == 1:
            return
        for weight in updated:
            value = weight.copies.to_device(weight.staging)
            weight.parameter.data.sub_(value).mul_(by).add_(value)

    def wait(self) -> None:
        self._shared.wait()

    def settle(self) -> None:
        """Has all weights take the values for which they have sent differences."""
        for bucket, _, progress in self._turns:
            if progress.awaits:
                progress.settle()
                _take_from_now_on(bucket)
            bucket.take()
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
            for bucket, _, progress in self._turns:
                self._exchange.push_difference(bucket)
                progress.exchanged()
                _take_from_now_on(bucket)
        self.wait()
        self._shared.pull()

    def weigh(self, weight: float) -> None:
        self._own.combine({Feature.WEIGHTS}, "opt.weigh()")

    def sum(self, number: Number) -> Number:
        (total,) = self._shared.worker.sums((number,))
        return total

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
            copied(bucket, progress, states.get(weight.parameter))
            for bucket, weight, progress in self._turns
        ]

    def _go_on(self) -> None:
        """Has this worker have what it had at the checkpoint from which the job goes on."""
        for bucket, weight, progress in self._turns:
            saved = self._own.own_trained(bucket.key.key)
            if saved is not None:
                state = go_on(bucket, progress, saved.numbers, saved.arrays)
                self._optimizer.state.pop(weight.parameter, None)
                if state is not None:
                    self._optimizer.state[weight.parameter] = state


def _take_from_now_on(bucket: Bucket) -> None:
    """Has whoever reads the weight wait for its value."""
    bucket.key.value_is_due()
    torch.autograd.graph.increment_version(bucket.weights[0].parameter)
    bucket.arm()


def _ready(
    exchange: ReferenceType[Exchange], weight: ReferenceType[Weight], parameter: torch.Tensor
) -> None:
    of_all, one = exchange(), weight()
    if of_all is not None and one is not None:
        of_all.note_order(one)
