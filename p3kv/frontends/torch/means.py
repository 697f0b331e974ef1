"""Gradients that become the mean of all workers', which servers keep, before a script uses them."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional, Tuple
from weakref import ref

import torch

from p3kv.frontends.torch.clipping import Clipping, LateNorm
from p3kv.frontends.torch.exchange import Exchange
from p3kv.frontends.torch.script_marks import waited
from p3kv.frontends.torch.values.bucket import Bucket, Weight
from p3kv.frontends.torch.values.leaving import Leaving, Own, Past
from p3kv.frontends.torch.values.watched import watcher_of
from p3kv.worker.stores import WorkerStore


class Means:
    """The means of the last step of which gradients have left, or of the one under way.

    A worker's own gradient becomes the mean where it is, and is multiplied as the script has
    clipped. To be used by one thread at a time.
    """

    def __init__(
        self,
        own: WorkerStore,
        exchange: Exchange,
        clipping: Clipping,
        of: Mapping[int, Tuple[Bucket, Weight]],
    ) -> None:
        """`of`: by a parameter's id, its bucket and its weight."""
        self._own, self._exchange, self._clipping, self._of = own, exchange, clipping, of
        self._kept: Dict[int, Tuple[int, Optional[torch.Tensor], int]] = {}
        """By bucket of several parameters: its round, and as `WorkerStore.mean_gradient`."""
        self._own_before: List[Tuple[Weight, ref[torch.Tensor], torch.Tensor]] = []
        """What gradients were before they became means, since gradients of the step leave."""

    def step_begins(self) -> None:
        """Gradients of another step leave."""
        self._kept.clear()
        self._own_before.clear()

    def add_up(self) -> None:
        """A pass of another step may add to gradients that the script has not zeroed: what became
        the mean is this worker's own again, since others may not have read theirs."""
        for weight, of, before in self._own_before:
            gradient = of()
            past = None if gradient is None else watcher_of(gradient)
            if isinstance(past, Past) and past.is_as_it_was and weight.parameter.grad is gradient:
                past.becomes(before, None)
        self._own_before.clear()

    def why_none(self, own: Own) -> str:
        """Why a gradient can't become the mean, whatever leaves and comes; empty if nothing is
        known against it. Raises NotSupportedError where the script has changed it."""
        if isinstance(own, Leaving) and own.factors != len(self._factors_of(own)):
            own.check(own.gradient)
        if own.factors is not None:
            return ""
        weight: Weight = own.weight
        if not weight.key.declared.keeps_means:
            return (
                "servers keep means where each round is exchanged, by a codec of gradients that "
                "remembers nothing, and none of sparse gradients"
            )
        if isinstance(own, Past) and own.round != weight.key.round:
            return "it is of an earlier step than the last one"
        if isinstance(own, Past) and not own.is_as_it_was:
            return "the script has changed it since the step"
        all_leave = self._clipping.is_known or self._clipping.has_clipped
        if isinstance(own, Leaving) and not all_leave:
            return "gradients of the first step leave in step"
        return ""

    def become(self, own: Own) -> str:
        """Has a gradient be what it is with DistributedDataParallel by now; returns why it can't
        be. All of the step have left. Waits for all workers'."""
        weight, gradient = own.weight, own.gradient
        if own.factors is None:
            if own.in_step:  # what leaves in `step` was seen until now
                if weight.leaving is None or weight.leaving.gradient is not gradient:
                    return "the script has replaced it"
                own = weight.leaving
            why = self._why_incomplete()
            if why:
                return why
            mean = self._mean_of(weight)
            self._own_before.append((weight, ref(gradient), gradient.detach().clone()))
            own.becomes(mean, 0)
        factors, done = self._factors_of(own), own.factors or 0
        for at, factor in enumerate(factors[done:], done + 1):
            own.becomes(gradient * _number(factor), at)
        return ""

    def fill(self) -> None:
        """Has parameters of which this worker lacks a gradient in the step under way, and another
        has one, have the mean, too. All of the step have left. Waits for all workers'."""
        for weight in self._lacked():
            gradient = torch.empty_like(weight.parameter).copy_(self._mean_of(weight))
            for factor in self._clipping.factors:
                gradient.mul_(_number(factor))
            weight.parameter.grad = gradient

    def _factors_of(self, own: Own) -> List[LateNorm | float]:
        return self._clipping.factors if own.in_step else self._clipping.last_factors

    def _mean_of(self, weight: Weight) -> torch.Tensor:
        bucket, _ = self._of[id(weight.parameter)]
        mean, _ = self._mean_of_bucket(bucket)
        assert mean is not None
        if weight.member:
            mean = mean.split([one.size_elems for one in weight.key.members])[weight.member - 1]
        return mean.view(weight.shape)

    def _mean_of_bucket(self, bucket: Bucket) -> Tuple[Optional[torch.Tensor], int]:
        """As `WorkerStore.mean_gradient`. That of several parameters is kept until the next
        step."""
        key = bucket.key
        round_, mean, lacking = self._kept.get(id(bucket), (-1, None, 0))
        if round_ != key.round:
            array, lacking = waited(lambda: self._own.mean_gradient(key))
            mean, lacking = (None, -1) if array is None else (torch.from_numpy(array), lacking)
            if not bucket.is_alone:
                self._kept[id(bucket)] = key.round, mean, lacking
        return mean, lacking

    def _why_incomplete(self) -> str:
        """Why the means are not those that DistributedDataParallel would have. Empty if they
        are."""
        for one in self._lacked():
            return (
                f"'{one.name}' has a gradient on another worker and none on this one, which the "
                "script may have left out"
            )
        return ""

    def _lacked(self) -> Iterator[Weight]:
        """Of what this worker lacks a gradient that another has."""
        self._exchange.asleep.settle()
        lacked = self._exchange.lacked
        while lacked:
            bucket, lacking = lacked[-1]
            _, by_all = self._mean_of_bucket(bucket)
            for at, one in enumerate(bucket.weights):
                if (lacking & ~by_all) >> at & 1 and one.parameter.requires_grad:
                    yield one
            lacked.pop()


def _number(factor: LateNorm | float) -> torch.Tensor | float:
    return factor.factor() if isinstance(factor, LateNorm) else factor
