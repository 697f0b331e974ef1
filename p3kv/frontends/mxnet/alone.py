"""The store in a process that belongs to no job: a notebook, a debugger, a first try."""

from __future__ import annotations

import ctypes
import logging
from typing import Dict, Iterable, List, Set

import mxnet as mx
from mxnet.base import _LIB, KVStoreHandle, check_call
from mxnet.kvstore import KVStore

from p3kv.wire.messages import Key

_log = logging.getLogger("p3kv")


class Alone(KVStore):
    """What `kvstore='p3'` is without servers and other workers: MXNet's own store of one process.

    A script gets the numbers of a job with one worker, and the same methods as in a job.
    """

    def __init__(self) -> None:
        handle = KVStoreHandle()
        check_call(_LIB.MXKVStoreCreate(b"local", ctypes.byref(handle)))
        super().__init__(handle)
        self._names: Set[Key] = set()
        _log.warning(
            "p3kv: kvstore='p3' trains in this process alone, since no launcher has started it "
            "(DMLC_ROLE is not set). 'p3kv launch -n 2 -s 2 -- python train.py' starts two workers."
        )

    @property
    def type(self) -> str:
        """As in a job."""
        return "dist_sync_p3"

    def name_keys(self, names: Iterable[Key]) -> None:
        """Takes note of the keys that a Trainer or Module will declare."""
        self._names.update(names)

    def has_any(self, keys: Iterable[Key]) -> bool:
        """Whether a Trainer or Module has declared a key, or will."""
        return not self._names.isdisjoint(keys)

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Has the store update weights, in this process."""
        self._set_updater(mx.optimizer.get_updater(optimizer))

    @property
    def forward_order(self) -> List[Key]:
        """Empty: there is nothing to send in an order."""
        return []

    def stats(self) -> Dict[str, int]:
        """Empty: nothing is sent."""
        return {}
