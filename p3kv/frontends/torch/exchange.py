"""Has gradients leave and values come, for the parameters of one optimizer."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import Iterable, List, NoReturn, Optional, Sequence, Tuple, Union
from weakref import WeakMethod

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.rows import RowsBucket
from p3kv.frontends.torch.script_marks import trace_forwards
from p3kv.frontends.torch.values.asleep import Asleep, settle_all
from p3kv.frontends.torch.values.bucket import Bucket, Gathered, Weight
from p3kv.frontends.torch.values.copies import Then
from p3kv.frontends.torch.values.devices import Devices
from p3kv.frontends.torch.values.leaving import LEAVE_OUT_BEFORE, Leaving, OnUse, is_part
from p3kv.frontends.torch.values.watched import leave_entrances, watch_entrances
from p3kv.frontends.torch.values.written import Written, is_written
from p3kv.store.pushes import Pushes
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import OnSlice, Pull, Push
from p3kv.worker.worker import Worker

WEIGHS_LATE = "opt.weigh() was called after gradients of the step had left: call it before backward"


class Exchange:
    """Begins the transfers of a store. `note` and `push` may be called in any thread that runs
    `backward`, all else belongs to the script's."""

    def __init__(
        self,
        worker: Worker,
        own: WorkerStore,
        pushes: Pushes[TorchScriptOptimizer],
        buckets: Sequence[Bucket],
        devices: Devices,
    ) -> None:
        """All parameters of a store, and the devices that they are on."""
        if worker.tracer.enabled:
            trace_forwards()
        self._worker = worker
        self._devices = devices
        self._own = own
        self._pushes = pushes
        self._buckets = buckets
        self._every = [weight for bucket in buckets for weight in bucket.weights]
        self._written = Written(self._every)
        self._in_step = False
        self._weight = self._next_weight = 1.0
        """By what this worker's gradients of the step count in the mean, and those of the next."""
        self._adds = self._next_adds = True
        """Whether these gradients leave."""
        self.on_use: Optional[WeakMethod[OnUse]] = None
        """Told of each use of a gradient that the script makes."""
        self.sees_weights = False
        """Whether what the script does to weights between `backward` and `step` is seen."""
        self._enters = False
        """Whether weights are read unseen, and modules that have them wait when they are called."""
        self._pushing = threading.RLock()
        """Held while a push is counted and begins. `backward` has a thread for each device, and may
        be called in several."""
        self.asleep = Asleep(worker, own, buckets, self._pushing, self._wake)
        self.lacked: List[Tuple[Bucket, int]] = []
        """Of which this worker lacks gradients in the step, which ones, as in `Bucket.lacking`."""
        self._order: Optional[List[Weight]] = []
        """Parameters as their gradients are ready in the first step."""

    def give_initial(self, bucket: Bucket) -> None:
        """Worker rank 0 sends initial values."""
        for weight in bucket.weights:
            weight.staging.copy_(weight.parameter.data)
        self._begun(bucket, INITIAL_ROUND, pushes=True, lands=False)(bucket.staging)

    def weigh(self, weight: float, adds: bool = True) -> None:
        """Has this worker's gradients count by `weight` in the mean of the step that is to begin;
        without `adds` they are none. Raises NotSupportedError where the step has begun."""
        if self._in_step:
            raise NotSupportedError(WEIGHS_LATE)
        self._next_weight, self._next_adds = weight, adds and weight > 0

    @property
    def weight(self) -> float:
        """By what this worker's gradients of the step count."""
        return self._weight if self._in_step else self._next_weight

    @property
    def leaves_out(self) -> bool:
        """Whether this worker's gradients of the step do not leave."""
        return not (self._adds if self._in_step else self._next_adds)

    def note(self, bucket: Bucket, weights: Iterable[Weight], in_step: bool = False) -> None:
        """Gradients of a bucket are complete, and must stay as they are until the value is there.
        `in_step`: the script is in `step` already, and not in `backward`.

        Raises NotSupportedError for a gradient that can't travel.
        """
        self.asleep.settle()
        for weight in weights:
            if not (weight.is_seen or in_step or self.sees_reads(weight)):
                raise NotSupportedError(
                    f"the weight '{weight.name}' has a gradient, and p3kv has not seen who read "
                    "it: code that torch does not tell of, such as an extension or a scripted "
                    "function, outside of the module that has it, or a forward pass before the "
                    "last opt.step(). The value may have been older. Call opt.wait() before the "
                    "forward pass"
                )
            if weight.is_late or weight.is_table:
                bucket.take(weight.parameter)
            gradient = weight.parameter.grad
            assert gradient is not None
            weight.check_gradient(gradient)
            self._written.check(weight)
            # A tensor that was written to before is not this backward pass's own.
            has_aliases = (
                not in_step
                and gradient._version > 0
                and (is_part(gradient) or self._written.is_turn_of(weight))
            )
            weight.leaving = Leaving(weight, gradient, bucket.wait, keeps_copy=has_aliases)
            weight.leaving.on_use = self.on_use
            if self.sees_weights:
                bucket.open(weight)
            if self._order is not None:
                self._order.append(weight)

    def written(self) -> bool:
        """Whether the script has written to a weight since the last step, as far as that shows."""
        return self._written.shows(self._buckets)

    def written_late(self, under_way: bool) -> bool:
        """Whether it has since `backward`; `under_way`: the step's values may be."""
        return self._written.shows_late(under_way)

    def accept_writes(self) -> None:
        """What the script has written to weights counts: the step under way is to be dropped."""
        self._written.is_accepted = True

    def check_kept(self, has_looked: bool) -> None:
        """Raises NotSupportedError where the script has written to a weight since its gradient has
        left, as far as that shows. `has_looked`: `written_late` has, at all that it can."""
        with torch._C.DisableTorchFunctionSubclass():
            self._written.check_kept(() if has_looked else self._buckets)

    def note_order(self, weight: Weight) -> None:
        """A parameter's gradient is complete, which in the first step tells the order."""
        if self._order is not None:
            self._order.append(weight)

    def push(self, bucket: Bucket, in_step: bool = False) -> None:
        """Sends gradients that have been noted. Those of parameters that are asleep leave when the
        script is in `step`."""
        with self._pushing:
            if bucket.pushed:  # by another thread, which has seen that the last gradient is there
                return
            self._begin_step()
            if bucket.asleep:
                if not in_step:
                    return
                self.asleep.woken(bucket)
            lacking = bucket.lacking
            if lacking:
                self.lacked.append((bucket, lacking))
                for weight in bucket.weights:
                    if weight.leaving is None:
                        self._take_unchanged(bucket, weight)
            round_, _ = self._pushes.next(bucket.key)
            with torch._C.DisableTorchFunctionSubclass():
                gathered = bucket.gathered()
            begin = self._begun(
                bucket, round_, pushes=True, on_slice=bucket.on_slice, lacking=lacking,
                gathered=gathered,
            )  # fmt: skip
            bucket.copies.to_host(gathered.flat, begin)

    def push_no_gradient(self, bucket: Bucket) -> None:
        """Says that this worker has no gradient of a bucket in this step."""
        for weight in bucket.weights:
            self._take_unchanged(bucket, weight)
        self._begin_step()
        self._push_nothing(bucket)

    def _take_unchanged(self, bucket: Bucket, weight: Weight) -> None:
        """Has a parameter that has no gradient take its last value; raises NotSupportedError where
        the script has changed that."""
        bucket.take(weight.parameter)
        if weight.parameter.requires_grad:  # a frozen one is the script's own
            self._written.check(weight)

    def _push_nothing(self, bucket: Bucket) -> None:
        changes: Future[bool] = Future()
        round_, _ = self._pushes.next(bucket.key, changes)
        bucket.pushed = True
        self.lacked.append((bucket, bucket.lacking))
        self.asleep.lacks(bucket, changes)
        bucket.copies.to_host(None, self._begun(bucket, round_, pushes=True, changes=changes))

    def _wake(self, bucket: Bucket) -> None:
        """Another worker has a gradient of parameters that were asleep in this step."""
        self._push_nothing(bucket)
        if self._in_step:
            return
        torch.autograd.graph.increment_version([one.parameter for one in bucket.weights])
        bucket.step_ends()
        bucket.arm()

    def push_difference(self, bucket: Bucket) -> None:
        """Sends by how much the servers' last value differs from a weight that this worker has
        trained by itself. Of a frozen one it says that it has nothing: the script may have written
        to it."""
        bucket.take()
        (weight,) = bucket.weights
        trains = not weight.is_frozen
        changes: Optional[Future[bool]] = None if trains else Future()
        round_, _ = self._pushes.next(bucket.key)  # that this counts is known on all workers
        begin = self._begun(bucket, round_, pushes=True, changes=changes)

        def subtract(value: Optional[torch.Tensor]) -> None:
            begin(None if value is None else weight.staging - value)

        bucket.copies.to_host(weight.parameter.detach() if trains else None, subtract)

    def check_gradients(self) -> None:
        """Raises NotSupportedError where a gradient has changed since `backward`."""
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                for weight in bucket.weights:
                    if weight.leaving is not None:
                        weight.leaving.check(weight.parameter.grad)
                    elif bucket.pushed and not self.leaves_out:
                        _check_none(weight)

    def push_remaining(self, buckets: Iterable[Bucket]) -> None:
        """Has all gradients of the step leave that have not left, and says of which parameters this
        worker has none."""
        self._begin_step()
        with torch._C.DisableTorchFunctionSubclass():  # gradients are of a class that is told
            for bucket in buckets:
                self._push_remaining(bucket)
        self.asleep.say(self._pushes.step)
        if self._pushes.clipping.clips:
            self.asleep.settle()  # the norm is of all that is pushed in the step

    def _push_remaining(self, bucket: Bucket) -> None:
        if bucket.pushed:
            return
        for weight in bucket.weights:
            gradient = weight.parameter.grad
            if weight.leaving is None and gradient is not None and not self.leaves_out:
                self.note(bucket, (weight,), in_step=True)
        if bucket.has_gradient:
            self.push(bucket, in_step=True)
        elif not bucket.asleep:
            self.push_no_gradient(bucket)
        else:
            for weight in bucket.weights:
                if weight.parameter.requires_grad:
                    self._written.check(weight)

    def pull(self, bucket: Bucket, exact: bool = False) -> None:
        """Asks for a value after this worker's last push; `exact`: as the servers have it, whatever
        the codec."""
        begin = self._begun(bucket, bucket.key.round, pushes=False, exact=exact)
        bucket.copies.to_host(None, begin)

    def end_step(self) -> None:
        """All parameters are pushed. The first step tells the forward order, which is the reverse
        of that of the gradients."""
        self._devices.step_ends()
        self._own.step_ends()
        self._written.step_ends()
        self._in_step = False
        self.asleep.arm()
        if self._written.knows_script and not self._enters:
            leave_entrances(self)
        else:
            watch_entrances(self)
        order, self._order = self._order, None
        if order:
            for weight in self._every:
                weight.is_first = weight is order[-1]
        if order and self._worker.rank == 0:
            weights = [*reversed(order), *self._every]
            self._own.publish_order(list(dict.fromkeys(weight.key.key for weight in weights)))

    def stop(self) -> None:
        """Values come no more."""
        leave_entrances(self)

    def sees_reads(self, weight: Weight) -> bool:
        """To be called of a weight that has a gradient: whether who read it has waited for its
        value, as far as p3kv has seen."""
        if not weight.is_seen and weight.was_entered:
            self._enters = True
        return weight.is_seen or weight.was_entered or weight.was_awaited

    def _begin_step(self) -> None:
        if not self._in_step:
            if self._own.is_saved:
                settle_all()  # a checkpoint may be due
            self.asleep.settle()
            self._in_step, self.lacked = True, []
            self._weight, self._next_weight = self._next_weight, 1.0
            self._adds, self._next_adds = self._next_adds, True
            self._pushes.one_step()
            self.asleep.begin_step()

    def _begun(
        self,
        bucket: Bucket,
        round_: int,
        pushes: bool,
        changes: Optional[Future[bool]] = None,
        exact: bool = False,
        lands: bool = True,
        on_slice: Optional[OnSlice] = None,
        lacking: int = 0,
        gathered: Optional[Gathered] = None,
    ) -> Then:
        """A value is under way from now on, after a push or a pull that begins when what is
        returned is called with its source; a push has one, or `changes` instead. The source is
        `gathered`, or a copy of it.
        `on_slice` is told what comes of a value that is the push's own."""
        key, step = bucket.key, self._pushes.step
        weight = self._weight if round_ > INITIAL_ROUND else 1.0
        exact = exact or key.is_exact(round_)
        takes = None
        if pushes and lands and not key.touched_only:
            takes = key.consistency.goes_on_with(round_)
        its = changes
        rounds = not key.codecs.values.in_place and key.consistency.local is None
        if changes is not None and exact and rounds and not is_written(bucket.weights[0]):
            its = None  # the checkpoint that may follow has the servers' own value
        bucket.note_changes(round_, takes, its)
        bucket.begin()
        if isinstance(bucket, RowsBucket):
            return bucket.exchange(
                self._worker.begin, round_, step, pushes, changes, exact, lands, gathered, weight
            )
        pulls = key.pulls if pushes else key.next_pull()
        own_step = key.own_step

        def begin(source: Optional[torch.Tensor]) -> None:
            if gathered is not None and source is gathered.flat:
                bucket.leaves_itself()
            target_at = bucket.staging.data_ptr() if lands else None
            done = partial(bucket.transferred, source, gathered)
            transfer: Union[Push, Pull]
            if pushes:
                source_at = None if source is None else source.data_ptr()
                transfer = Push(key, round_, step, source_at, target_at, done)
                transfer.after_pulls, transfer.changes, transfer.takes = pulls, changes, takes
                transfer.has_value = takes is None  # nobody else writes to the staging memory
                transfer.lacking, transfer.own_step = lacking, own_step
                transfer.weight = weight
            else:
                transfer = Pull(key, round_, step, pulls, target_at, done)
            transfer.exact = exact
            if takes is None:
                transfer.on_slice = on_slice
            self._worker.begin(transfer)

        return begin


def _check_none(weight: Weight) -> None:
    """Raises NotSupportedError where a parameter has a gradient though it had none when gradients
    left, as where a step is clipped before its last backward pass."""
    if weight.parameter.grad is not None:
        raise NotSupportedError(
            f"'{weight.name}' has a gradient that it had not when opt.clip_grad_norm_() was "
            "called: call that after the last backward pass of a step"
        )


def refuse_second(weight: Weight) -> NoReturn:
    """A backward pass has computed a gradient where one has left in the same step."""
    leaving, gradient = weight.leaving, weight.parameter.grad
    if leaving is None:
        _check_none(weight)
    assert leaving is not None and gradient is not None
    if gradient is not leaving.gradient:
        raise NotSupportedError(
            f"'{weight.name}' has a new gradient before opt.step(), and the one before, which was "
            f"dropped, had left for the servers: {_OTHER_LOSSES}; {LEAVE_OUT_BEFORE}"
        )
    if leaving.writes > 1:
        leaving.check(gradient)
    raise NotSupportedError(
        f"the gradient of '{weight.name}' has left, and a second backward pass adds to it before "
        f"opt.step(): {_OTHER_LOSSES}. Where a reentrant checkpoint brings a gradient in parts, "
        "put all in, or give use_reentrant=False; or set P3KV_UPDATES=workers"
    )


_OTHER_LOSSES = (
    "put all backward passes of a step but the last into 'with opt.no_sync():', and those of other "
    "losses that reach the weight"
)
