"""Finds weights that the script has written to, though servers keep them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Optional, Sequence

import numpy as np
import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.tensors import array_of, bits
from p3kv.frontends.torch.values.late import Late
from p3kv.worker.saving.cuts import Unpushed

_ALL_UNTIL_STEP = 3
"""In so many steps every weight is compared, for what a script does before its first step, or from
then on."""


class Written:
    """Compares weights with what the servers have sent last. Belongs to the script's thread.

    torch counts writes into a tensor, but not those through `weight.data` or NumPy, which p3kv
    sees while a weight is late: until it is read for the first time after a step. So a weight with
    such a write is compared, and in each step one more, in turn: a script that writes in every step
    is found, and comparing takes no time.
    """

    def __init__(self, every: Sequence[Late]) -> None:
        self._turns = {id(late): turn for turn, late in enumerate(every)}
        self._steps = 0

    def step_ends(self) -> None:
        """The next step's comparisons begin."""
        self._steps += 1

    @property
    def knows_script(self) -> bool:
        """Whether the first steps are over."""
        return self._steps > _ALL_UNTIL_STEP

    def is_turn_of(self, late: Late) -> bool:
        """Whether what torch does not count is looked for in this step."""
        turn = self._steps % len(self._turns) == self._turns[id(late)]
        return turn or self._steps < _ALL_UNTIL_STEP

    def check(self, late: Late) -> None:
        """Raises NotSupportedError for a weight that has been written to; not while its next value
        is under way."""
        if late.is_table:
            return
        may_be = late.may_be_written() or late.parameter._version != late.value_version
        everywhere = self._steps < _ALL_UNTIL_STEP or may_be
        if everywhere or late.newest is not None or self.is_turn_of(late):  # the newest are few
            rows = None if everywhere else late.newest
            with torch._C.DisableTorchFunctionSubclass():
                value = _value(late, rows)
            late.copies.to_host(value, partial(_refuse_other, late, rows))
            late.value_version = late.parameter._version


def _refuse_other(late: Late, rows: Optional[torch.Tensor], value: Optional[torch.Tensor]) -> None:
    """Raises NotSupportedError unless a weight, or some of its rows, are the servers'."""
    assert value is not None
    if _differs(late, rows, value):
        raise NotSupportedError(
            f"the script has written to the weight '{late.name}', and the next step would undo it: "
            "servers keep the weights from the moment at which p3kv.torch.Optimizer is made. Load "
            "and initialise weights before, or make a new p3kv.torch.Optimizer afterwards"
        )


def is_written(late: Late) -> bool:
    """Whether a weight is another one than the servers'. No other value may be under way."""
    if late.is_table:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return _differs(late, None, _value(late).cpu().contiguous())


def copied(late: Late) -> Unpushed:
    """A copy, for a checkpoint, of a weight to which no gradient brings another value."""
    with torch._C.DisableTorchFunctionSubclass():
        value: Future[np.ndarray] = Future()
        copy = _value(late).to("cpu", copy=True, memory_format=torch.contiguous_format)
        value.set_result(array_of(copy))
        shape = tuple(late.parameter.shape)
        return Unpushed(late.tensor, late.name, shape, late.key.dtype, value)


def _value(late: Late, rows: Optional[torch.Tensor] = None) -> torch.Tensor:
    value = late.parameter.detach()
    return value if rows is None else value.index_select(0, late.copies.to_device(rows))


def _differs(late: Late, rows: Optional[torch.Tensor], value: torch.Tensor) -> bool:
    """Whether a value in the host's memory is another one than the servers'."""
    known = late.staging if rows is None else late.staging.index_select(0, rows)
    return not torch.equal(bits(value), bits(known))
