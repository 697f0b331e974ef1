"""Has gradients leave and values come, for the parameters of one optimizer."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import Iterable, List, NoReturn, Optional, Sequence

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.optimizers.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.rows import LateRows
from p3kv.frontends.torch.script_marks import trace_forwards
from p3kv.frontends.torch.values.asleep import Asleep, settle_all
from p3kv.frontends.torch.values.bucket import Unit
from p3kv.frontends.torch.values.copies import Then
from p3kv.frontends.torch.values.devices import Devices
from p3kv.frontends.torch.values.late import Late
from p3kv.frontends.torch.values.leaving import LEAVE_OUT_BEFORE, Leaving, is_part
from p3kv.frontends.torch.values.watched import leave_entrances, watch_entrances
from p3kv.frontends.torch.values.written import Written
from p3kv.store.pushes import Pushes
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import OnSlice, Transfer
from p3kv.worker.worker import Worker


class Exchange:
    """Begins the transfers of a store. `note` and `push` may be called in any thread that runs
    `backward`, all else belongs to the script's."""

    def __init__(
        self,
        worker: Worker,
        own: WorkerStore,
        pushes: Pushes[TorchScriptOptimizer],
        units: Sequence[Unit],
        devices: Devices,
    ) -> None:
        """All parameters of a store in `units`, and the devices that they are on."""
        if worker.tracer.enabled:
            trace_forwards()
        self._worker = worker
        self._devices = devices
        self._own = own
        self._pushes = pushes
        self._written = Written([late for unit in units for late in unit.members])
        self._in_step = False
        self._enters = False
        """Whether weights are read unseen, and modules that have them wait when they are called."""
        self._pushing = threading.RLock()
        """Held while a push is counted and begins. `backward` has a thread for each device, and may
        be called in several."""
        self.asleep = Asleep(worker, own, units, self._pushing, self._wake)
        self._order: Optional[List[Late]] = []
        """Parameters as their gradients are ready in the first step."""

    def give_initial(self, unit: Unit) -> None:
        """Worker rank 0 sends initial values."""
        for late in unit.members:
            late.staging.copy_(late.parameter.data)
        self._begun(unit, INITIAL_ROUND, pushes=True, lands=False)(unit.staging)

    def note(self, late: Late, in_step: bool = False) -> None:
        """A parameter's gradient is complete, and must stay as it is until the value is there.
        `in_step`: the script is in `step` already, and not in `backward`.

        Raises NotSupportedError for a gradient that can't travel.
        """
        self.asleep.settle()
        if not in_step and not self.sees_reads(late):
            raise NotSupportedError(
                f"the weight '{late.name}' has a gradient, and p3kv has not seen who read it: code "
                "that torch does not tell of, such as an extension or a scripted function, outside "
                "of the module that has it, or a forward pass before the last opt.step(). The "
                "value may have been older. Call opt.wait() before the forward pass"
            )
        late.take()
        gradient = late.parameter.grad
        assert gradient is not None
        if isinstance(late, LateRows):
            late.check_layout(gradient)
        elif gradient.layout is not torch.strided:
            raise NotSupportedError(
                f"the gradient of '{late.name}' is sparse, and nothing said so when "
                "p3kv.torch.Optimizer was made: make the model with Embedding(sparse=True) or "
                "EmbeddingBag(sparse=True) before, or use SparseAdam"
            )
        made_with = late.staging
        if gradient.device != late.device or not _are_alike(gradient, made_with):
            raise NotSupportedError(
                f"the gradient of '{late.name}' is {_kind(gradient, gradient.device)}; p3kv.torch "
                f"takes one like the parameter when p3kv.torch.Optimizer was made, which was "
                f"{_kind(made_with, late.device)}"
            )
        self._written.check(late)
        # A tensor that was written to before is not this backward pass's own.
        has_aliases = (
            not in_step
            and gradient._version > 0
            and (is_part(gradient) or self._written.is_turn_of(late))
        )
        late.leaving = Leaving(late.name, gradient, late.wait, keeps_copy=has_aliases)
        self.note_order(late)

    def note_order(self, late: Late) -> None:
        """A parameter's gradient is complete, which in the first step tells the order."""
        if self._order is not None:
            self._order.append(late)

    def push(self, unit: Unit, in_step: bool = False) -> None:
        """Sends gradients that have been noted. Those of parameters that are asleep leave when the
        script is in `step`."""
        with self._pushing:
            self._begin_step()
            if unit.asleep:
                if not in_step:
                    return
                self.asleep.woken(unit)
            lacking = unit.lacking
            if lacking:
                for late in unit.members:
                    if late.leaving is None:
                        self._take_unchanged(late)
            round_, _ = self._pushes.next(unit.key)
            with torch._C.DisableTorchFunctionSubclass():
                source = unit.source()
            begin = self._begun(unit, round_, pushes=True, on_slice=unit.on_slice, lacking=lacking)

            def begin_with(memory: Optional[torch.Tensor]) -> None:
                if memory is source:
                    unit.leaves_itself()
                begin(memory)

            unit.copies.to_host(source, begin_with)

    def push_no_gradient(self, unit: Unit) -> None:
        """Says that this worker has no gradient of a unit in this step."""
        for late in unit.members:
            self._take_unchanged(late)
        self._begin_step()
        self._push_nothing(unit)

    def _take_unchanged(self, late: Late) -> None:
        """Has a parameter that has no gradient take its last value; raises NotSupportedError where
        the script has changed that."""
        late.take()
        if late.parameter.requires_grad:  # a frozen one is the script's own
            self._written.check(late)

    def _push_nothing(self, unit: Unit) -> None:
        changes: Future[bool] = Future()
        round_, _ = self._pushes.next(unit.key, changes)
        unit.lack_gradients()
        self.asleep.lacks(unit, changes)
        unit.copies.to_host(None, self._begun(unit, round_, pushes=True, changes=changes))

    def _wake(self, unit: Unit) -> None:
        """Another worker has a gradient of parameters that were asleep in this step."""
        self._push_nothing(unit)
        if self._in_step:
            return
        for late in unit.members:
            late.pushed = False
            torch.autograd.graph.increment_version(late.parameter)
            if late.parameter.requires_grad:
                late.value_version = late.parameter._version
            late.arm()

    def push_difference(self, late: Late) -> None:
        """Sends by how much the servers' last value differs from a weight that this worker has
        trained by itself. Of a frozen one it says that it has nothing: the script may have written
        to it."""
        late.take()
        trains = late.parameter.requires_grad
        changes: Optional[Future[bool]] = None if trains else Future()
        round_, _ = self._pushes.next(late.key)  # that this counts is known on all workers
        begin = self._begun(late, round_, pushes=True, changes=changes)

        def subtract(weight: Optional[torch.Tensor]) -> None:
            begin(None if weight is None else late.staging - weight)

        late.copies.to_host(late.parameter.detach() if trains else None, subtract)

    def push_remaining(self, units: Iterable[Unit]) -> None:
        """Has all gradients of the step leave that have not left, and says of which parameters this
        worker has none. Raises NotSupportedError where one has changed since `backward`."""
        self._begin_step()
        with torch._C.DisableTorchFunctionSubclass():  # gradients are of a class that is told
            for unit in units:
                self._push_remaining(unit)
        self.asleep.say(self._pushes.step)
        if self._pushes.clipping.clips:
            self.asleep.settle()  # the norm is of all that is pushed in the step

    def _push_remaining(self, unit: Unit) -> None:
        for late in unit.members:
            if late.leaving is not None:
                late.leaving.check(late.parameter.grad)
            elif late.pushed:
                _check_none(late)
            elif late.parameter.grad is not None:
                self.note(late, in_step=True)
        if unit.pushed:
            return
        if unit.has_gradient:
            self.push(unit, in_step=True)
        elif not unit.asleep:
            self.push_no_gradient(unit)
        else:
            for late in unit.members:
                if late.parameter.requires_grad:
                    self._written.check(late)

    def pull(self, unit: Unit, exact: bool = False) -> None:
        """Asks for a value after this worker's last push; `exact`: as the servers have it, whatever
        the codec."""
        unit.copies.to_host(None, self._begun(unit, unit.key.round, pushes=False, exact=exact))

    def end_step(self, every: Sequence[Late]) -> None:
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
            for late in every:
                late.is_first = late is order[-1]
        if order and self._worker.rank == 0:
            lates = [*reversed(order), *every]
            self._own.publish_order(list(dict.fromkeys(late.key.key for late in lates)))

    def stop(self) -> None:
        """Values come no more."""
        leave_entrances(self)

    def sees_reads(self, late: Late) -> bool:
        """To be called of a weight that has a gradient: whether who read it has waited for its
        value, as far as p3kv has seen."""
        if not late.is_seen and late.was_entered:
            self._enters = True
        return late.is_seen or late.was_entered or late.was_awaited

    def _begin_step(self) -> None:
        if not self._in_step:
            if self._own.is_saved:
                settle_all()  # a checkpoint may be due
            self.asleep.settle()
            self._in_step = True
            self._pushes.one_step()
            self.asleep.begin_step()

    def _begun(
        self,
        unit: Unit,
        round_: int,
        pushes: bool,
        changes: Optional[Future[bool]] = None,
        exact: bool = False,
        lands: bool = True,
        on_slice: Optional[OnSlice] = None,
        lacking: int = 0,
    ) -> Then:
        """A value is under way from now on, after a push or a pull that begins when what is
        returned is called with its source; a push has one, or `changes` instead.
        `on_slice` is told what comes of a value that is the push's own."""
        key, step = unit.key, self._pushes.step
        exact = exact or key.is_exact(round_)
        takes = None
        if pushes and lands and key.consistency.lets_go_ahead and not key.touched_only:
            takes = key.consistency.needs(round_)
        unit.note_changes(round_, takes, changes)
        unit.begin()
        if isinstance(unit, LateRows):
            return unit.exchange(self._worker.begin, round_, step, pushes, changes, exact, lands)
        asks = key.asks() if pushes else (key.ask(),)

        def begin(source: Optional[torch.Tensor]) -> None:
            transfer = Transfer(
                key, round_, step, 0,
                source.data_ptr() if source is not None else 0 if pushes else None,
                unit.staging.data_ptr() if lands else None,
                partial(_arrived, unit, source), asks, changes, takes,
                exact=exact, on_slice=on_slice if takes is None else None,
                # Nobody else writes to the staging memory.
                has_value=pushes and takes is None,
            )  # fmt: skip
            transfer.lacking = lacking
            self._worker.begin(transfer)

        return begin


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _kind(value: torch.Tensor, device: torch.device) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)} on {device}"


def _arrived(unit: Unit, source: Optional[torch.Tensor], error: Optional[BaseException]) -> None:
    """Called in the worker's thread; `source` stays until then."""
    unit.arrived(error)


def _check_none(late: Late) -> None:
    """Raises NotSupportedError where a parameter has a gradient though it had none when gradients
    left, as where a step is clipped before its last backward pass."""
    if late.parameter.grad is not None:
        raise NotSupportedError(
            f"'{late.name}' has a gradient that it had not when opt.clip_grad_norm_() was called: "
            "call that after the last backward pass of a step"
        )


def refuse_second(late: Late) -> NoReturn:
    """A backward pass has computed a gradient where one has left in the same step."""
    leaving, gradient = late.leaving, late.parameter.grad
    if leaving is None:
        _check_none(late)
    assert leaving is not None and gradient is not None
    if gradient is not leaving.gradient:
        raise NotSupportedError(
            f"'{late.name}' has a new gradient before opt.step(), and the one before, which was "
            f"dropped, had left for the servers: {_OTHER_LOSSES}; {LEAVE_OUT_BEFORE}"
        )
    if leaving.writes > 1:
        leaving.check(gradient)
    raise NotSupportedError(
        f"the gradient of '{late.name}' has left, and a second backward pass adds to it before "
        f"opt.step(): {_OTHER_LOSSES}. Where a reentrant checkpoint brings a gradient in parts, "
        "put all in, or give use_reentrant=False"
    )


_OTHER_LOSSES = (
    "put all backward passes of a step but the last into 'with opt.no_sync():', and those of other "
    "losses that reach the weight"
)
