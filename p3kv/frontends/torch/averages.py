"""Steps that each worker makes by the script's own optimizer: servers average gradients."""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from p3kv.common.combinations import Feature
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.buffers import Buffers
from p3kv.frontends.torch.exchange import WEIGHS_LATE
from p3kv.frontends.torch.hooks import Hooks
from p3kv.frontends.torch.joining import How
from p3kv.frontends.torch.optimizers.script_optimizer import TorchGoesOn, TorchScriptOptimizer
from p3kv.frontends.torch.passes import Passes, is_in_backward, tell_no_more, tell_of_passes
from p3kv.frontends.torch.refusals import check_all_stay
from p3kv.frontends.torch.rows import RowSums, sparse_weights
from p3kv.frontends.torch.shared_model import SharedModel
from p3kv.frontends.torch.steps import CommonSteps, evaluated, own_step, parameters_of
from p3kv.frontends.torch.values.asleep import Asleep
from p3kv.frontends.torch.values.bucket import Bucket, Gathered, Weight
from p3kv.frontends.torch.values.tally import Tally
from p3kv.store.client import Client
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Push, features_of
from p3kv.worker.worker import Worker

_log = logging.getLogger("p3kv")
_NOTHING = -1.0
"""How a weight of 0 is told, beside weights of 1, which are not."""
_AGAIN = 1 << 16
"""What a worker adds to a parameter's number in `Gradients`, beside 1 if it lacks its gradient."""


class AverageSteps(CommonSteps):
    """Makes steps by the script's own optimizer, on each worker alike. When a backward pass ends
    outside of `no_sync`, every gradient is the mean of all workers', as with
    DistributedDataParallel (Li et al., VLDB 2020): whatever the script then does to gradients, or
    its optimizer to weights, comes out as there.

    Each gradient leaves as soon as it is complete. The pass ends when all means are there.
    """

    def __init__(
        self,
        client: Client[TorchScriptOptimizer],
        model: Optional[torch.nn.Module],
        optimizer: torch.optim.Optimizer,
        shared: SharedModel,
        gradients: Gradients,
        passes: Passes,
    ) -> None:
        """`shared` has the optimizer's parameters, and its store no optimizer. `check_sums` has
        raised nothing."""
        super().__init__(model, optimizer, client.own, client.worker)
        self._shared, self._passes, self._pushes = shared, passes, client.pushes
        client.pushes.marks_steps = True
        self._pass = Pass(client, shared, gradients)
        self._weights: Optional[Buffers] = None
        """Has the weights be those of the last worker that had a batch, when an epoch is over."""
        self.has_passed = False
        """Whether a backward pass has ended in this step."""
        self._hooks = Hooks(shared.buckets, self.ready)
        self._hooks.add()
        tell_of_passes(self)

    @classmethod
    def attached(
        cls,
        client: Client[TorchScriptOptimizer],
        model: Optional[torch.nn.Module],
        optimizer: torch.optim.Optimizer,
        buffers: Optional[str],
        passes: Passes,
        older: Optional[SharedModel] = None,
        why: str = "",
    ) -> AverageSteps:
        """Shares the parameters of an optimizer, and has it step by means. `buffers` as in
        `SharedModel`. `older`: what has shared them before; `why` it does not any more. Raises
        what `SharedModel` and `check_sums` raise."""
        sparse = sparse_weights(model, optimizer, by_servers=False)
        shared = SharedModel(
            client, model, optimizer, buffers, whole=False, sparse=sparse, by_servers=False
        )
        check_sums(client, shared)
        gradients = Gradients(client.worker, client.own, shared.every)
        steps = cls(client, model, optimizer, shared, gradients, passes)
        if older is not None:
            shared.follow(older)
        shared.begin(steps, why)
        return steps

    @classmethod
    def renewed(
        cls, before: CommonSteps, shared: SharedModel, passes: Passes, why: str = ""
    ) -> AverageSteps:
        """As `attached`, with a new store in place of that which has shared the parameters."""
        rule = before._own.consistency
        client: Client[TorchScriptOptimizer] = Client("torch", TorchGoesOn, rule)
        model, optimizer = before._model, before._optimizer
        return cls.attached(client, model, optimizer, shared.chosen_buffers, passes, shared, why)

    def exchange_now(self) -> None:
        """Has the gradients that there are be the means of all workers', as after a pass."""
        self._pass.begin()  # which none of torch's hooks has
        self.finish()

    def ready(self, parameter: torch.Tensor) -> None:
        """A gradient is complete: torch's hook, in the thread that runs `backward`."""
        _, averages = self._passes.reached(parameter)
        if not averages:
            return
        if self._pass.ready(parameter) and not is_in_backward():
            # Something else than torch.autograd.backward has called torch's engine.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def say_why(self, why: str) -> None:
        """Tells, once for a job, why workers update the weights though nobody has said so."""
        self.why = why
        if self._shared.worker.rank == 0:
            _log.warning(
                "servers average gradients, and each worker's own optimizer steps: %s. Training is "
                "right, and waits for gradients as with DistributedDataParallel. "
                "P3KV_UPDATES=workers, or updates='workers', says that this is meant",
                why,
            )

    def begin_pass(self, roots: Sequence[Any]) -> None:
        self._hooks.stay_last()

    @torch._disable_dynamo
    def finish(self) -> None:
        """Ends a backward pass, if one has begun: waits for all means, which are the gradients
        then."""
        if self._pass.is_open:
            self._end_pass()

    def _end_pass(self, is_absent: bool = False) -> None:
        self._shared.check()
        if self._joined is not None and not is_absent:
            self.attendance.say(self._pushes.step, True)
        self._pass.finish()
        if self._joined is not None:  # who is absent hears of passes, and not of steps
            self._shared.push_buffers(self._attendance)
        self.has_passed = True

    def check_added(self, parameters: Any) -> None:
        self._shared.check()
        self._check_between()

    def added(self) -> None:
        """All parameters are shared anew, as the scheduler and the servers know a store's."""
        if len(parameters_of(self._optimizer)) > len(self._places):
            self.share_anew()

    def share_anew(self) -> None:
        """Has the gradients be means of all parameters that are to have them now."""
        steps = AverageSteps.renewed(self, self._shared, self._passes)
        steps.why, steps._pace = self.why, self._pace
        if self._pass.weight != 1.0:
            steps.weigh(self._pass.weight)
        self._give_way(steps)

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        self._shared.check()
        self._check_groups(may_have_fewer=True)
        self.finish()  # what the script has caught an error of
        skips = self._takes_skip()
        returned = evaluated(closure) if skips else own_step(self._optimizer, closure)
        self.has_passed = False
        self._pass.weigh(1.0)
        self._pace.step_ended()
        if self._joined is None:
            self._shared.push_buffers()
        return returned

    def skip(self, drops: bool) -> torch.Tensor:
        if self._pass.is_open or not self.has_passed:
            # Others wait for this worker in their backward passes, also if it has failed before.
            self._end_pass()
        if self._joined is not None:
            raise NotSupportedError(
                "opt.skip_step() inside of opt.join() asks all workers, and one without batches "
                "does not answer: leave one of both out"
            )
        return super().skip(drops)

    def wait(self) -> None:
        self._shared.wait()

    def weigh(self, weight: float) -> None:
        self._shared.check()
        self._check_weighs()
        if self._pass.is_open or self.has_passed:
            raise NotSupportedError(WEIGHS_LATE)
        self._pass.weigh(weight)
        self._pace.samples = weight

    @property
    def asleep(self) -> Asleep:
        return self._shared.exchange.asleep

    def begin_epoch(self, how: How) -> None:
        """As with DistributedDataParallel, a worker without batches adds nothing to the means of
        the others' passes, and takes the weights of one of them when all are over."""
        self._shared.check()
        super().begin_epoch(how)
        if self._weights is None:
            self._weights = self._shared.weights_as_buffers()

    def end_epoch(self, is_over: bool) -> None:
        super().end_epoch(is_over)
        if not is_over or self._weights is None:
            return
        last, self.attendance.last = self.attendance.last, None
        if last is not None:
            self._weights.push(self._pushes.step, last)
            self._weights.wait()

    def say_absent(self) -> None:
        self.attendance.say(self._pushes.step, False)

    def step_absent(self) -> None:
        assert self._joined is not None
        every = self._shared.weights
        before = [one.grad for one in every]
        for one in every:
            one.grad = None
        self._pass.weight = 1.0 if self._joined.counts_absent else 0.0
        self._end_pass(is_absent=True)
        self._pass.weight, self.has_passed = 1.0, False
        for one, gradient in zip(every, before):
            one.grad = gradient

    def stop(self) -> None:
        self.wait()
        self._hooks.remove()
        self._shared.stop()
        tell_no_more(self)


class Pass:
    """A backward pass: sums of all workers' gradients are under way.

    All workers make the same passes. Each pushes every bucket once in a pass, with its gradients as
    they are then, or says that it has none. A gradient that changes after it has left, as where a
    reentrant checkpoint brings it in parts, is pushed once more by all. Buckets of which no worker
    had a gradient in the last pass are left out, until one has. `ready` is called in threads that
    run `backward`, `finish` in the script's.
    """

    def __init__(
        self, client: Client[TorchScriptOptimizer], shared: SharedModel, gradients: Gradients
    ) -> None:
        self._own = client.own
        self._worker = client.worker
        self._pushes = client.pushes
        self._buckets, self._of = shared.buckets, shared.of_parameter
        self._workers = client.num_workers
        self._gradients = gradients
        self._pushing = threading.RLock()
        """Held while a push is counted and begins: `backward` has a thread for each device."""
        self.is_open = False
        """Whether gradients of the pass have come, and it has not ended."""
        self._came: Set[int] = set()
        """By the parameters' ids: whose gradients have come in this pass."""
        self._pushed: List[Bucket] = []
        """In the order in which they have left in this pass."""
        self._again: Set[int] = set()
        """By the parameters' ids: those in buckets of which one has changed after it had left."""
        self._held: Set[int] = set()
        """By the buckets' ids: which leave when `backward` has ended, since that has happened."""
        self.weight = 1.0
        """By what this worker's gradients count in the mean, to be set by `weigh`."""

    def weigh(self, weight: float) -> None:
        """Has this worker's gradients count by `weight` in the mean from the next pass on. Raises
        NotSupportedError for float16, in which the weighted sum may be too large."""
        if weight != 1.0 and any(_overflows(bucket) for bucket in self._buckets):
            raise NotSupportedError(
                "opt.weigh() would have sums of float16 gradients be too large for float16: train "
                "in bfloat16, or have the servers update (updates='servers')"
            )
        self.weight = weight

    def begin(self) -> bool:
        """Begins the pass; returns whether it had not begun."""
        begins, self.is_open = not self.is_open, True
        if begins:
            self._pushes.one_step()
        return begins

    def ready(self, parameter: torch.Tensor) -> bool:
        """A parameter's gradient is complete, as far as torch knows; returns whether the pass
        begins with it."""
        bucket, _ = self._of[id(parameter)]
        with self._pushing:
            begins = self.begin()
            self._came.add(id(parameter))
            if bucket.pushed:
                self._again.update(id(one.parameter) for one in bucket.weights)
            elif id(bucket) not in self._held and all(
                id(one.parameter) in self._came or not one.parameter.requires_grad
                for one in bucket.weights
            ):
                self._push(bucket)
            return begins

    def finish(self) -> None:
        """Has all gradients leave that have not, and waits until each is the mean of all workers';
        zeros of those that lack it. One that no worker has stays None."""
        with self._pushing, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.begin()
            for bucket in self._buckets:
                if not bucket.pushed and (not bucket.asleep or self._has_any(bucket)):
                    self._push(bucket)
            lacking, again, divisor = self._gradients.heard(
                self._pushes.step, self.weight, self._again
            )
            for bucket in self._buckets:
                is_lacked = all(id(one.parameter) in lacking for one in bucket.weights)
                if not bucket.pushed and not is_lacked:
                    self._push(bucket)
                bucket.asleep = is_lacked and bucket is not self._buckets[0]  # a pass has a push
                if any(id(one.parameter) in again for one in bucket.weights):
                    _await(bucket)
                    self._check_sent_twice(bucket)
                    self._held.add(id(bucket))
                    self._push(bucket)
            for bucket in self._pushed:
                _await(bucket)
                having = [one for one in bucket.weights if id(one.parameter) not in lacking]
                if having:
                    self._write(bucket, having, divisor)
            if not self.weight:
                for bucket in self._buckets:
                    for one in bucket.weights:
                        if id(one.parameter) in lacking:
                            one.parameter.grad = None  # as on the others
            for bucket in self._pushed:
                bucket.pushed = False
            self._pushed, self.is_open = [], False
            self._came.clear()
            self._again.clear()

    def _check_sent_twice(self, bucket: Bucket) -> None:
        declared = bucket.key.declared
        if Feature.REMEMBERING in features_of(declared, self._own.rule):
            raise NotSupportedError(
                f"the gradient of {bucket.key.called} came in parts, as by a reentrant checkpoint, "
                f"and the codec {declared.codecs.gradients} remembers what it has sent of the "
                "first: give use_reentrant=False, or use another codec (float16)"
            )

    def _push(self, bucket: Bucket) -> None:
        """Sends the gradients of a bucket as they are, or says that this worker has none."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gathered = self._gathered(bucket)
        if not bucket.pushed:
            bucket.pushed = True
            self._pushed.append(bucket)
        key = bucket.key
        round_, step = self._pushes.next(key)
        pulls, own_step, weight = key.pulls, key.own_step, self.weight
        bucket.begin()
        if isinstance(bucket, RowSums):
            changes: Optional[Future[bool]] = Future() if gathered is None else None
            send = bucket.exchange(
                self._worker.begin, round_, step, pushes=True, changes=changes, exact=False,
                lands=True, gathered=None, weight=weight,
            )  # fmt: skip
            bucket.copies.to_host(None if gathered is None else gathered.flat, send)
            return

        def begin(source: Optional[torch.Tensor]) -> None:
            source_at = None if source is None else source.data_ptr()
            done = partial(bucket.transferred, source, gathered)
            push = Push(key, round_, step, source_at, bucket.staging.data_ptr(), done)
            push.after_pulls, push.own_step, push.weight = pulls, own_step, weight
            push.changes = Future() if source is None else None
            self._worker.begin(push)

        bucket.copies.to_host(None if gathered is None else gathered.flat, begin)

    def _gathered(self, bucket: Bucket) -> Optional[Gathered]:
        """The gradients of a bucket as they travel; None where there is none, or none counts."""
        if not self.weight:
            return None
        gradients: List[Optional[torch.Tensor]] = []
        for weight in bucket.weights:
            gradient = weight.parameter.grad
            if gradient is not None:
                weight.check_gradient(gradient)
                gradient = gradient.detach()
            gradients.append(gradient)
        if all(one is None for one in gradients):
            return None
        divides = _overflows(bucket)
        if not bucket.is_alone:
            gathered = bucket.joined(gradients)
            if divides:
                gathered.flat.div_(self._workers)
            return gathered
        (gradient,) = gradients
        assert gradient is not None
        if isinstance(bucket, RowSums):
            gradient = bucket.gathered_rows(gradient)
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        return Gathered(gradient / self._workers if divides else gradient)

    def _has_any(self, bucket: Bucket) -> bool:
        return self.weight > 0 and any(one.parameter.grad is not None for one in bucket.weights)

    def _write(self, bucket: Bucket, having: Sequence[Weight], divisor: float) -> None:
        """Makes the means, whose sums are there, the gradients of some parameters of a bucket."""
        divisor = 1 if _overflows(bucket) else divisor
        if isinstance(bucket, RowSums):
            bucket.copies.arm()
            (weight,) = having
            mean = bucket.sums().to(weight.device) / divisor
            if weight.parameter.grad is None:
                weight.parameter.grad = mean
            else:  # which the script may have taken already
                weight.parameter.grad.copy_(mean)
            return
        pairs = []
        for weight in having:
            if weight.parameter.grad is None:
                weight.parameter.grad = torch.empty_like(weight.parameter)
            pairs.append((weight.parameter.grad.detach(), weight.staging))

        def write() -> None:
            for gradient, total in pairs:
                if gradient.device == total.device:
                    torch.div(total, divisor, out=gradient)
                else:
                    gradient.copy_(total, non_blocking=True).div_(divisor)

        bucket.copies.arm()
        bucket.copies.write(write)
        bucket.copies.reach_reader()


class Gradients:
    """Which parameters have gradients, and by what each worker's count: all workers say it in each
    pass, by one small key. Who lacks none, and counts by 1, sends no number. Belongs to whoever
    holds the lock of the pass."""

    def __init__(self, worker: Worker, own: WorkerStore, every: Sequence[Weight]) -> None:
        """Makes the key known to the job; all workers do."""
        self._every = every
        self._rank, self._workers = worker.rank, worker.num_workers
        # The bits of each worker's weight come behind the parameters: a sum of one and zeros.
        self._tally = Tally(
            worker, own, "who lacks gradients",
            "how many workers lack a gradient of each parameter", len(every) + 2 * self._workers,
        )  # fmt: skip

    def any_says(self, says: bool) -> bool:
        """Whether any worker says yes. Waits for all workers, which call it in place of
        `heard`."""
        return self._summed(0, [int(says)] + [0] * (len(self._every) - 1)) is not None

    def heard(self, step: int, weight: float, again: Set[int]) -> Tuple[Set[int], Set[int], float]:
        """Says which gradients this worker lacks, all if its weight is 0, and which have changed
        after they had left, by their parameters' ids (`again`); returns by these ids which all
        workers lack, and which have changed on any, and the sum of all weights. Waits for all
        workers."""
        numbers = [
            (not weight or one.parameter.grad is None) + _AGAIN * (id(one.parameter) in again)
            for one in self._every
        ]
        heard = self._summed(step, numbers, weight)
        if heard is None:
            return set(), set(), self._workers
        ids = [id(one.parameter) for one in self._every]
        told = heard[len(ids) :].numpy().view(np.float64).tolist()
        sums = heard[: len(ids)].tolist()
        return (
            {at for at, number in zip(ids, sums) if number % _AGAIN == self._workers},
            {at for at, number in zip(ids, sums) if number >= _AGAIN},
            math.fsum(max(0.0, one) if one else 1.0 for one in told),
        )

    def _summed(self, step: int, numbers: List[int], weight: float = 1.0) -> Optional[torch.Tensor]:
        """The sums of all workers' numbers, and what follows them; None where all are 0, and all
        weights 1."""
        weights = np.zeros(self._workers)
        if weight != 1.0:
            weights[self._rank] = weight or _NOTHING
        said = self._tally.said
        said[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        said[len(numbers) :] = torch.from_numpy(weights.view(np.int32))
        self._tally.push(step, says=any(numbers) or weight != 1.0)
        return self._tally.sums()


def check_sums(client: Client[TorchScriptOptimizer], shared: SharedModel) -> None:
    """Raises NotSupportedError for settings by which a store's sums would not be those of all
    workers' gradients."""
    own, what = client.own, "p3kv.torch.Optimizer(..., updates='workers')"
    if own.rule.own_rounds:
        raise NotSupportedError(
            f"{what}: in an asynchronous store each worker's gradients are exchanged by "
            "themselves, and have no mean: use the consistency bulk_synchronous"
        )
    own.combine({Feature.NO_OPTIMIZER}, what)
    check_all_stay(client.worker.settings, "the mean of gradients")
    for bucket in shared.buckets:
        if Feature.REMEMBERS_VALUES in features_of(bucket.key.declared, own.rule):
            raise NotSupportedError(
                f"{what}: the codec {bucket.key.declared.codecs.values} sends by how much a value "
                "has changed, and means of gradients are new in each step: use another "
                "P3KV_VALUE_CODEC (float16)"
            )


def _overflows(bucket: Bucket) -> bool:
    """Whether a sum may be too large for the dtype, where the mean is not."""
    return bucket.weights[0].dtype is torch.float16


def _await(bucket: Bucket) -> None:
    """Waits for the sum of a round. Raises the job's failure."""
    bucket.await_value()
    if bucket.error is not None:
        raise bucket.error
