"""What checkpoints have of a weight that this worker trains by itself, and of its optimizer."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet.arrays import DENSE
from p3kv.frontends.mxnet.optimizers.optimizer_settings import KEPT_BY_KEY
from p3kv.frontends.mxnet.optimizers.plain_states import put_together
from p3kv.frontends.mxnet.unpushed import Local, copied
from p3kv.store import nested
from p3kv.worker.saving.cuts import Trained, TrainedArray
from p3kv.worker.transfers import WorkerKey

_WEIGHT, _AS_SENT = "weight", "as_sent"
_STATE, _UPDATES, TAKES_AT = "state", "updates", "takes_at"
_REMEMBERED = ("num_update", "m_schedule", "cur_lr", "last_lr")
"""Attributes of MXNet's optimizers that updates change, of all keys together."""


class InnerOptimizer:
    """A worker's own optimizer, with its states. Belongs to the script's thread."""

    def __init__(self, updater: Any) -> None:
        """`updater` is MXNet's."""
        self._updater = updater

    @property
    def _optimizer(self) -> mx.optimizer.Optimizer:
        return self._updater.optimizer

    @property
    def name(self) -> str:
        return type(self._optimizer).__name__

    def remembered(self) -> Dict[str, Any]:
        """What is the same for all keys, as plain values."""
        values = vars(self._optimizer)
        return {name: values[name] for name in _REMEMBERED if name in values}

    def go_on(self, remembered: Mapping[str, Any], steps: int) -> None:
        """Goes on from another training's `remembered`; without any, as after so many steps."""
        if not remembered:
            self._optimizer.num_update = self._optimizer.begin_num_update + steps
        vars(self._optimizer).update(remembered)

    def copied(
        self, key: WorkerKey, first: NDArray, as_sent: Optional[NDArray], takes_at: Optional[int]
    ) -> Trained:
        """Copies a key's weight, its weight when its difference left, if it awaits a value, and its
        state, when all operations of MXNet's engine have ended that were pushed before. Raises
        NotSupportedError for a state that files can't have."""
        arrays = {_WEIGHT: _copied(key, first)}
        if as_sent is not None:
            arrays[_AS_SENT] = _copied(key, as_sent)

        def keep(value: Any) -> Optional[str]:
            if not isinstance(value, NDArray):
                return None
            name = f"{_STATE}{len(arrays)}"
            arrays[name] = _copied(key, value)
            return name

        kept = self._kept.get(key.key)
        numbers = {
            TAKES_AT: takes_at,
            _UPDATES: self._counts(first).get(key.key),
            _STATE: nested.take_apart((self._updater.states.get(key.key), kept), keep),
        }
        return Trained(key.key_id, key.key, numbers, arrays)

    def restore(
        self,
        key: WorkerKey,
        first: NDArray,
        numbers: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
    ) -> Optional[NDArray]:
        """Gives a key's weight and state back; returns the weight when its difference left."""
        state, kept = put_together(numbers[_STATE], arrays)
        first[:] = _array(arrays[_WEIGHT])
        if numbers[_UPDATES] is not None:
            self._counts(first)[key.key] = numbers[_UPDATES]
        if state is not None:
            self._updater.states[key.key] = state
            self._updater.states_synced[key.key] = False  # it may be another device's
        if kept is not None:
            self._kept[key.key] = kept
        if _AS_SENT not in arrays:
            return None
        return _array(arrays[_AS_SENT]).as_in_context(first.context)

    @property
    def _kept(self) -> Dict[Any, Any]:
        """Values that the optimizer keeps for each key in itself."""
        kept: Dict[Any, Any] = getattr(self._optimizer, KEPT_BY_KEY.get(self.name, ""), {})
        return kept

    def _counts(self, first: NDArray) -> Dict[Any, int]:
        """How often the optimizer has updated each key on a weight's device."""
        counts: Dict[Any, int] = self._optimizer._all_index_update_counts.setdefault(
            first.context.device_id, {}
        )
        return counts


def _copied(key: WorkerKey, array: NDArray) -> TrainedArray:
    if array.stype != DENSE:
        raise NotSupportedError(
            f"the optimizer's state of {key.called} is {array.stype}, which checkpoints of workers "
            "that train by themselves can't have; use dense arrays, or unset P3KV_CHECKPOINT_DIR"
        )
    copy = copied(Local(key.key, "", [array]))
    return TrainedArray(copy.shape, copy.dtype, copy.value)


def _array(value: np.ndarray) -> NDArray:
    return mx.nd.array(value, dtype=value.dtype)
