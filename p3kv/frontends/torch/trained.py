"""What checkpoints have of a parameter that this worker trains by itself."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Dict, Mapping

import numpy as np
import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.tensors import array_of, tensor_in
from p3kv.frontends.torch.values.bucket import Bucket
from p3kv.store.states import put_together, take_apart
from p3kv.store.turns import Progress
from p3kv.worker.saving.cuts import Trained, TrainedArray

_WEIGHT, _AS_SENT = "weight", "as_sent"
_TAKES_AT, _STATE = "takes_at", "state"
_BOOL, _ON_HOST = "bool", "on_host"
"""In the structure of a state: an array that travels as uint8, and one that is not on the
parameter's device but on the CPU, as Adam's count of steps."""


def copied(bucket: Bucket, progress: Progress, state: Any) -> Trained:
    """Copies its parameter's weight, whose value is taken if it is due, and its inner optimizer's
    state. Raises NotSupportedError for a state that files can't have."""
    bucket.take()
    (weight,) = bucket.weights
    arrays: Dict[str, TrainedArray] = {}
    _keep(arrays, _WEIGHT, weight.parameter.detach())
    numbers: Dict[str, Any] = {}
    if weight.as_sent is not None and bucket.value_changes(weight):
        _keep(arrays, _AS_SENT, weight.as_sent)
        numbers[_TAKES_AT] = progress.takes_at

    def keep(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        name = f"{_STATE}{len(arrays)}"
        is_bool = value.dtype is torch.bool
        _keep(arrays, name, value.to(torch.uint8) if is_bool else value)
        if is_bool:
            return {_BOOL: name}
        return name if value.device == weight.device else {_ON_HOST: name}

    numbers[_STATE] = take_apart(state, keep)
    return Trained(bucket.key.key_id, bucket.key.key, numbers, arrays)


def go_on(
    bucket: Bucket, progress: Progress, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Any:
    """Gives its parameter the weight of then, where it has the servers' value, and has it await the
    value that it awaited; returns its inner optimizer's state."""
    (weight,) = bucket.weights
    with torch.no_grad():
        weight.parameter.copy_(tensor_in(arrays[_WEIGHT]).reshape(weight.parameter.shape))
    if _AS_SENT in arrays:
        progress.takes_at = numbers[_TAKES_AT]
        as_sent = tensor_in(arrays[_AS_SENT]).reshape(weight.parameter.shape)
        weight.as_sent = as_sent.to(weight.device)
        # The value that is awaited is there already: the servers gave it as the initial one.
        bucket.begin()
        bucket.arrived(None)

    def array(kept: Any) -> torch.Tensor:
        if not isinstance(kept, dict):
            return tensor_in(arrays[kept]).to(weight.device)
        if _ON_HOST in kept:
            return tensor_in(arrays[kept[_ON_HOST]])
        return tensor_in(arrays[kept[_BOOL]]).to(weight.device, torch.bool)

    return put_together(numbers[_STATE], array)


def _keep(arrays: Dict[str, TrainedArray], name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_complex():
        raise NotSupportedError(
            f"the optimizer's state has a tensor of {tensor.dtype} and {tensor.layout}, which "
            "checkpoints can't have; use another optimizer, or unset P3KV_CHECKPOINT_DIR"
        )
    array = array_of(tensor.detach().cpu().contiguous().clone())
    value: Future[np.ndarray] = Future()
    value.set_result(array)
    arrays[name] = TrainedArray(array.shape, array.dtype.name, value)
