"""The store in a process that belongs to no job: a notebook, a debugger, a first try."""

from __future__ import annotations

import ctypes
import logging
from contextlib import contextmanager
from math import prod
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Set,
    Tuple,
)

import mxnet as mx
from mxnet.base import _LIB, KVStoreHandle, check_call
from mxnet.kvstore import KVStore
from mxnet.ndarray import NDArray

from p3kv.common.combinations import Feature, check
from p3kv.consistency import ASYNCHRONOUS
from p3kv.errors import ConfigError
from p3kv.frontends.mxnet import refusals, rows
from p3kv.frontends.mxnet.arrays import DENSE, ROW_SPARSE, by_key, check_kind
from p3kv.frontends.mxnet.environment import ASYNC_TYPE, SYNC_TYPE
from p3kv.frontends.mxnet.optimizers.sgd_after_momentum import after_momentum, momentum_of
from p3kv.store.clipped_steps import checked
from p3kv.store.compression import Compression, choice
from p3kv.wire.messages import Key, called
from p3kv.worker.measures import nothing_measured

_log = logging.getLogger("p3kv")


class Alone(KVStore):
    """Store of `kvstore='p3'` without servers and other workers: MXNet's own, of one process. A
    script gets the numbers of a job with one worker, and the same methods as in a job."""

    def __init__(self, consistency: Optional[str] = None) -> None:
        """`consistency` chooses the store's rule in a job, if that is not the job's."""
        self.consistency = consistency
        handle = KVStoreHandle()
        check_call(_LIB.MXKVStoreCreate(b"local", ctypes.byref(handle)))
        super().__init__(handle)
        self._names: Set[Key] = set()
        self._has_keys = False
        self.compression_params: Optional[Mapping[str, Any]] = None
        """Parameters given to `set_gradient_compression`."""
        self._compression: Optional[Compression] = None
        self.max_norm: Optional[float] = None
        """Norm given to `clip_global_norm`."""
        self._norm: Optional[float] = None
        self._inside = False
        self._gathered: List[Tuple[Key, NDArray]] = []
        """Pushes of a step that is clipped, until its end."""
        self._pulls: List[Tuple[Any, ...]] = []
        self._pushes: Dict[Key, int] = {}
        self._steps = 0
        _log.warning(
            "p3kv: kvstore='p3' trains in this process alone, since no launcher has started it "
            "(DMLC_ROLE is not set). 'p3kv launch -n 2 -- python train.py' starts two workers."
        )

    @property
    def type(self) -> str:
        """Type of the store, as in a job."""
        return ASYNC_TYPE if self.consistency == ASYNCHRONOUS else SYNC_TYPE

    local_rank, local_size = 0, 1
    resumed_steps = 0
    """Zero steps: there are no checkpoints without a job."""

    def name_keys(self, names: Iterable[Key]) -> None:
        """Takes note of the keys that a Trainer or Module will declare."""
        self._names.update(names)

    @property
    def is_taken(self) -> bool:
        """Whether anybody has used the store, as in a job."""
        return bool(self._updater or self._names or self._has_keys)

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Has the store update weights, in this process."""
        if self._compression is not None and self._compression.applies_momentum:
            self._compression.use_momentum(type(optimizer).__name__, momentum_of(optimizer))
            optimizer = after_momentum(optimizer)
        self._set_updater(mx.optimizer.get_updater(optimizer))

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Has gradients change as they would on their way to servers."""
        chosen = choice(compression_params)
        if self._has_keys:
            raise ConfigError(
                f"the store has keys already; choose the codec {chosen} before the first key is "
                "initialised"
            )
        self._compression = Compression(chosen)
        self.compression_params = compression_params

    def init(self, key: Any, value: Any) -> None:
        """Declares keys."""
        self._has_keys = True
        super().init(key, value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Declares keys and gives `value` to `out`."""
        self._has_keys = True
        super().broadcast(key, value, out, priority)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Pushes gradients."""
        if self.max_norm is None:
            super().push(*self._arrived(key, value), priority)
        else:
            self._gather(*self._arrived(key, value))

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Receives values into `out`."""
        if self._gathered:
            self._pulls.append((key, out, priority, ignore_sparse))
        else:
            super().pull(key, out, priority, ignore_sparse)

    def synchronize(self) -> None:
        """Does nothing: values are always exact."""

    def exchange(self) -> None:
        """Does nothing: all workers have the same weights."""

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Receives the rows with these numbers into row_sparse arrays."""
        if out is not None and row_ids is not None:
            for one_key, outs, ids in rows.ids_by_out(key, out, row_ids):
                rows.named_rows(called(one_key, None), outs[0].shape[0], ids)
        super().row_sparse_pull(key, out, priority, row_ids)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Pushes gradients and receives the result into `out` (by default `value`)."""
        if self._compression is None and self.max_norm is None:
            super().pushpull(key, value, out, priority)
        else:
            self.push(key, value, priority)
            self.pull(key, value if out is None else out, priority)

    def push_no_gradient(self, key: Key, out: Any = None, priority: int = 0) -> Callable[[], bool]:
        """Leaves a key as it is, since there are no other workers that might have a gradient."""
        if self.max_norm is not None and not self._gathered:
            self._norm = 0.0  # of a step that has no gradients at all
        return lambda: False

    def clip_global_norm(self, max_norm: Optional[float]) -> None:
        """Scales the gradients of each step so that the norm of all together is at most
        `max_norm`; None ends this."""
        if self._compression is not None and self._compression.applies_momentum:
            check({Feature.MOMENTUM, Feature.CLIPPING}, "steps are to be clipped")
        self.max_norm = None if max_norm is None else checked(max_norm)
        self._pushes.clear()
        self._steps = 0

    def global_norm(self) -> Optional[float]:
        """The norm of all gradients of the last step, before they were scaled."""
        return self._norm

    @contextmanager
    def one_step(self, fresh: Optional[Collection[Key]] = None) -> Iterator[None]:
        """Groups the pushes inside into one step, for `clip_global_norm`."""
        self._inside = self.max_norm is not None
        try:
            yield
        finally:
            self._inside = False
            self._end_step()

    def _gather(self, key: Any, value: Any) -> None:
        if self._updater is None:
            check({Feature.CLIPPING, Feature.NO_OPTIMIZER}, "the step is to be clipped")
        grouped = by_key(key, value)
        most = max(self._pushes.get(one, 0) for one, _ in grouped)
        if not self._inside and most < self._steps:
            refusals.refuse_part_of_a_step([one for one, _ in grouped])
        for one, gradients in grouped:
            self._pushes[one] = self._pushes.get(one, 0) + 1
            self._steps = max(self._steps, self._pushes[one])
            several = [gradient.as_in_context(gradients[0].context) for gradient in gradients]
            total = mx.nd.add_n(*several) if len(several) > 1 else several[0].copy()
            self._gathered.append((one, total))
        if not self._inside:
            self._end_step()

    def _end_step(self) -> None:
        gathered, self._gathered = self._gathered, []
        pulls, self._pulls = self._pulls, []
        if gathered:
            totals = [total for _, total in gathered]
            self._norm = float(mx.gluon.utils.clip_global_norm(totals, self.max_norm))
        for key, total in gathered:
            super().push(key, total)
        for pull in pulls:
            super().pull(*pull)

    def _arrived(self, key: Any, value: Any) -> Any:
        """Keys and gradients as a push takes them, after the codec."""
        if self._compression is None:
            return key, value
        if self._compression.applies_momentum and self._updater is None:
            check({Feature.MOMENTUM, Feature.NO_OPTIMIZER}, "the store has no optimizer")
        grouped = by_key(key, value)
        return [one for one, _ in grouped], [self._arrived_sum(*of_key) for of_key in grouped]

    def _arrived_sum(self, key: Key, gradients: List[NDArray]) -> NDArray:
        """The sum of a key's gradients, one for each device, after the codec; of sparse ones the
        rows that they have. Raises NotSupportedError as in a job."""
        assert self._compression is not None
        for gradient in gradients:
            check_kind(called(key, None), gradient, (DENSE, ROW_SPARSE))
        total = first = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient.as_in_context(first.context)
        of_rows = total.stype == ROW_SPARSE
        elements = (total.data if of_rows else total).asnumpy()
        arrived = self._compression.round_trip(key, elements, prod(first.shape), of_rows)
        if of_rows:
            return mx.nd.sparse.row_sparse_array(
                (arrived, total.indices), first.shape, first.context, first.dtype
            )
        return mx.nd.array(arrived, first.context, first.dtype)

    @property
    def forward_order(self) -> List[Key]:
        """Empty: there is nothing to send in an order."""
        return []

    def stats(self) -> Dict[str, Any]:
        """Zeros: nothing is sent."""
        return nothing_measured()
