"""Has gradients leave and values come, for the parameters of one optimizer."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Iterable, List, Optional, Sequence

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.late import Late
from p3kv.frontends.torch.rows import LateRows
from p3kv.frontends.torch.script_optimizer import TorchScriptOptimizer
from p3kv.frontends.torch.written import Written
from p3kv.store.pushes import Pushes
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import OnSlice, Transfer
from p3kv.worker.worker import Worker


class Exchange:
    """Begins the transfers of a store. Belongs to the script's thread."""

    def __init__(
        self,
        worker: Worker,
        own: WorkerStore,
        pushes: Pushes[TorchScriptOptimizer],
        every: Sequence[Late],
    ) -> None:
        """`every` parameter."""
        self._worker = worker
        self._own = own
        self._pushes = pushes
        self._written = Written(every)
        self._in_step = False
        self._order: Optional[List[Key]] = []
        """Keys as their gradients are ready in the first step."""

    def give_initial(self, late: Late) -> None:
        """Worker rank 0 sends a parameter's initial value."""
        late.staging.copy_(late.parameter.data)
        self._begin(late, INITIAL_ROUND, late.staging, lands=False)

    def note(self, late: Late) -> None:
        """A parameter's gradient is complete, and must stay as it is until the value is there.

        Raises NotSupportedError for a gradient that can't travel.
        """
        late.take()  # of a weight that nobody has read since
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
        if not _are_alike(gradient, late.staging):
            raise NotSupportedError(
                f"the gradient of '{late.name}' is {_kind(gradient)}; p3kv.torch takes one like "
                f"the parameter when p3kv.torch.Optimizer was made, which was "
                f"{_kind(late.staging)}"
            )
        self._written.check(late)
        late.gradient, late.version = gradient, gradient._version
        self.note_order(late)

    def note_order(self, late: Late) -> None:
        """A parameter's gradient is complete, which in the first step tells the order."""
        if self._order is not None:
            self._order.append(late.key.key)

    def push(self, late: Late) -> None:
        """Sends a gradient that has been noted."""
        gradient = late.gradient
        assert gradient is not None
        self._begin_step()
        round_, _ = self._pushes.next(late.key)
        late.pushed = True
        sent = gradient.detach()
        sent = sent.coalesce() if sent.is_sparse else sent.contiguous()
        self._begin(late, round_, sent, on_slice=late.on_slice)

    def push_no_gradient(self, late: Late) -> None:
        """Says that this worker has no gradient of a parameter in this step."""
        late.take()
        if late.parameter.requires_grad:  # a frozen one is the script's own
            self._written.check(late)
        self._begin_step()
        changes: Future[bool] = Future()
        round_, _ = self._pushes.next(late.key, changes)
        late.pushed = True
        self._begin(late, round_, None, changes)

    def push_difference(self, late: Late) -> None:
        """Sends by how much the servers' last value differs from a weight that this worker has
        trained by itself. Of a frozen one it says that it has nothing: the script may have written
        to it."""
        late.take()
        source: Optional[torch.Tensor] = None
        changes: Optional[Future[bool]] = None
        if late.parameter.requires_grad:
            source = (late.staging - late.parameter.detach()).contiguous()
        else:
            changes = Future()
        self._begin_step()
        round_, _ = self._pushes.next(late.key)  # that this counts is known on all workers
        self._begin(late, round_, source, changes)

    def push_remaining(self, every: Iterable[Late]) -> None:
        """Has all gradients of the step leave that have not left, and says of which parameters this
        worker has none. Raises NotSupportedError where one has changed since `backward`."""
        for late in every:
            if late.pushed or late.gradient is not None:
                _check_unchanged(late)
            elif late.parameter.grad is not None:
                self.note(late)
            if late.pushed:
                continue
            if late.gradient is not None:
                self.push(late)
            else:
                self.push_no_gradient(late)

    def pull(self, late: Late, exact: bool = False) -> None:
        """Asks for a parameter's value after this worker's last push; `exact`: as the servers have
        it, whatever the codec."""
        self._begin(late, late.key.round, None, exact=exact)

    def end_step(self, every: Sequence[Late]) -> None:
        """All parameters are pushed. The first step tells the forward order, which is the reverse
        of that of the gradients."""
        self._own.step_ends()
        self._written.step_ends()
        self._in_step = False
        order, self._order = self._order, None
        if order:
            for late in every:
                late.is_first = late.key.key == order[-1]
        if order and self._worker.rank == 0:
            keys = [*reversed(order), *(late.key.key for late in every)]
            self._own.publish_order(list(dict.fromkeys(keys)))

    def _begin_step(self) -> None:
        if not self._in_step:
            self._in_step = True
            self._pushes.one_step()

    def _begin(
        self,
        late: Late,
        round_: int,
        source: Optional[torch.Tensor],
        changes: Optional[Future[bool]] = None,
        exact: bool = False,
        lands: bool = True,
        on_slice: Optional[OnSlice] = None,
    ) -> None:
        """Begins a transfer: a push where there is a source, or `changes` instead of one; else a
        pull. `on_slice` is told what comes of a value that is the push's own."""
        key = late.key
        pushes = source is not None or changes is not None
        exact = exact or (pushes and key.is_exact(round_))
        takes = None
        if pushes and lands and key.consistency.lets_go_ahead and not key.touched_only:
            takes = key.consistency.needs(round_)
        late.note_changes(round_, takes, changes)
        late.begin()
        if isinstance(late, LateRows):
            step = self._pushes.step
            late.exchange(self._worker.begin, round_, step, source, changes, exact, lands)
            return
        self._worker.begin(
            Transfer(
                key, round_, self._pushes.step, 0,
                source.data_ptr() if source is not None else 0 if pushes else None,
                late.staging.data_ptr() if lands else None,
                partial(_arrived, late, source), key.asks() if pushes else (key.ask(),), changes,
                takes, exact=exact, on_slice=on_slice if takes is None else None,
            )
        )  # fmt: skip


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.device == other.device


def _kind(value: torch.Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"


def _arrived(late: Late, source: Optional[torch.Tensor], error: Optional[BaseException]) -> None:
    """Called in the worker's thread; `source` stays until then."""
    late.arrived(error)


def _check_unchanged(late: Late) -> None:
    gradient = late.parameter.grad
    if gradient is late.gradient and (gradient is None or gradient._version == late.version):
        return
    raise NotSupportedError(
        f"the gradient of '{late.name}' was changed after backward had computed it, when it had "
        "left: clip by opt.clip_grad_norm_(max_norm), which clips the mean of all workers' "
        "gradients, and not by torch.nn.utils.clip_grad_norm_; call zero_grad after step()"
    )
