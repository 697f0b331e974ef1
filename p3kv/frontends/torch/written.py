"""Finds weights that the script has written to, though servers keep them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Optional, Sequence

import numpy as np
import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.late import Late
from p3kv.worker.cuts import Unpushed

_ALL_UNTIL_STEP = 3
"""In so many steps every weight is compared, for what a script does before its first step, or from
then on."""


class Written:
    """Compares weights with what the servers have sent last. Belongs to the script's thread.

    torch counts writes into a tensor, but not those through `weight.data` or NumPy. So a weight
    whose count has changed is compared, and in each step one more, in turn: a script that writes
    in every step is found, and comparing takes no time.
    """

    def __init__(self, every: Sequence[Late]) -> None:
        self._turns = {id(late): turn for turn, late in enumerate(every)}
        self._steps = 0

    def step_ends(self) -> None:
        """The next step's comparisons begin."""
        self._steps += 1

    def check(self, late: Late) -> None:
        """Raises NotSupportedError for a weight that has been written to; not while its next value
        is under way."""
        everywhere = self._steps < _ALL_UNTIL_STEP or late.parameter._version != late.value_version
        is_due = (
            everywhere
            or late.newest is not None  # few rows
            or self._steps % len(self._turns) == self._turns[id(late)]
        )
        if is_due and is_written(late, None if everywhere else late.newest):
            raise NotSupportedError(
                f"the script has written to the weight '{late.name}', and the next step would undo "
                "it: servers keep the weights from the moment at which p3kv.torch.Optimizer is "
                "made. Load and initialise weights before, or make a new p3kv.torch.Optimizer "
                "afterwards"
            )


def is_written(late: Late, rows: Optional[torch.Tensor] = None) -> bool:
    """Whether a weight is another one than the servers', or some of its rows are. No other value
    may be under way."""
    with torch._C.DisableTorchFunctionSubclass():
        value, known = late.parameter.detach(), late.staging
        if rows is not None:
            value, known = value.index_select(0, rows), known.index_select(0, rows)
        if torch.equal(_bits(value.contiguous()), _bits(known)):
            late.value_version = late.parameter._version
            return False
        return True


def copied(late: Late) -> Unpushed:
    """A copy, for a checkpoint, of a weight to which no gradient brings another value."""
    with torch._C.DisableTorchFunctionSubclass():
        value: Future[np.ndarray] = Future()
        value.set_result(late.parameter.detach().contiguous().clone().numpy())
        key = late.key
        return Unpushed(key.key, late.name, key.shape, key.dtype, value)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as whole numbers, of which each equals itself; nan does not."""
    return value.view(_WHOLE[value.element_size()])


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
