"""Dtypes that travel, and tensors in the memory of arrays."""

from __future__ import annotations

from typing import Dict, Tuple

import ml_dtypes
import numpy as np
import torch

HALVES = (torch.float16, torch.bfloat16)
"""Servers update a copy of such weights in single precision, and round it."""
DTYPES: Dict[torch.dtype, str] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""The names of what travels."""
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensor_in(array: np.ndarray) -> torch.Tensor:
    """A tensor in the memory of an array, also of one of bfloat16, for which torch has no way."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The reverse, of a contiguous tensor."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def sparse_tensor(numbers: np.ndarray, rows: torch.Tensor, shape: Tuple[int, ...]) -> torch.Tensor:
    """A sparse tensor of these rows, whose numbers ascend; its values are `rows`."""
    index = torch.from_numpy(numbers.astype(np.int64)).reshape(1, -1)
    return torch.sparse_coo_tensor(index, rows, shape, is_coalesced=True, check_invariants=False)


def bits(value: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as whole numbers, of which each equals itself; nan does not."""
    return value.view(_WHOLE[value.element_size()])


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
