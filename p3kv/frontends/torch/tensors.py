"""Dtypes that travel, and tensors in the memory of arrays."""

from __future__ import annotations

from typing import Dict

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


def tensor_in(array: np.ndarray) -> torch.Tensor:
    """A tensor in the memory of an array, also of one of bfloat16, for which torch has no way."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
