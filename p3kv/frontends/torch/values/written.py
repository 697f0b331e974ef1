"""Finds weights that the script has written to, though servers keep them."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Optional, Sequence

import numpy as np
import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.tensors import array_of, bits
from p3kv.frontends.torch.values.bucket import Bucket, Weight
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

    def __init__(self, every: Sequence[Weight]) -> None:
        self._every = every
        self._steps = 0
        self._compares_all = True
        self.is_accepted = False
        """Whether what the script writes is not looked for any more."""
        self._turn: Optional[Weight] = None
        """That which is compared in this step, whatever shows."""
        self._turn_value: Optional[torch.Tensor] = None
        """A copy of it, when its gradient was complete."""
        self._is_known = self._is_turn_known = False
        """Whether all have been compared in this step, before its backward pass; whether that has
        whose turn it is."""

    def step_ends(self) -> None:
        """The next step's comparisons begin."""
        self._steps += 1
        self._compares_all = self._steps < _ALL_UNTIL_STEP
        self._is_known = self._is_turn_known = False
        self._turn_value = None
        if self._every:
            self._turn = self._every[self._steps % len(self._every)]

    @property
    def knows_script(self) -> bool:
        """Whether the first steps are over."""
        return self._steps > _ALL_UNTIL_STEP

    def is_turn_of(self, weight: Weight) -> bool:
        """Whether what torch does not count is looked for in this step."""
        return weight is self._turn or self._compares_all

    def shows(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the script has written to a weight, as far as that shows without a comparison of
        all but in the first steps; waits for the values of those to which it may have."""
        compares_all = self._compares_all and not self._is_known
        turn = None if self._is_turn_known or self._turn is None else self._turn
        if turn is not None and (turn.is_late or turn.device.type != "cpu"):
            turn = None
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in buckets:
                for weight in bucket.weights:
                    parameter = weight.parameter
                    if not parameter.requires_grad:  # a frozen one is the script's own
                        continue
                    may_be = weight.may_be_written() or parameter._version != weight.value_version
                    if may_be or compares_all or weight is turn or weight.differs_by_sample:
                        bucket.take(parameter)
                        if is_written(weight):
                            return True
                        weight.value_version = parameter._version
        self._is_known |= compares_all
        self._is_turn_known |= turn is not None
        return False

    def shows_late(self, under_way: bool) -> bool:
        """Whether the script has written to a weight since its gradient is complete, as far as that
        shows without a comparison but of one on the CPU, in turn, and of all in the first steps if
        no values are `under_way`."""
        compares_all = self._compares_all and not under_way
        with torch._C.DisableTorchFunctionSubclass():
            if any(
                one.parameter._version != one.value_version
                or one.is_written_by_data
                or (compares_all and is_written(one))
                for one in self._every
                if one.parameter.requires_grad
            ):
                return True
            turn, before = self._turn, self._turn_value
            if turn is None or before is None or before.device.type != "cpu":
                return False
            return not torch.equal(bits(_value(turn).contiguous()), bits(before.contiguous()))

    def check_kept(self, buckets: Sequence[Bucket]) -> None:
        """Raises NotSupportedError for a weight that has been written to since its gradient has
        left, as far as that shows: its next value is under way."""
        for bucket in buckets:
            for weight in bucket.weights if bucket.pushed else ():
                one, counts = weight.parameter, not weight.is_table
                if one._version != weight.value_version and one.requires_grad and counts:
                    raise _lost(weight)
        turn, before = self._turn, self._turn_value
        if turn is not None and before is not None and (buckets or before.device.type != "cpu"):
            turn.copies.to_host(_value(turn), partial(_refuse_lost, turn, before))

    def check(self, weight: Weight) -> None:
        """Raises NotSupportedError for a weight that has been written to; not while its next value
        is under way."""
        if weight.is_table or self.is_accepted:
            return
        with torch._C.DisableTorchFunctionSubclass():
            may_be = weight.may_be_written() or weight.parameter._version != weight.value_version
            everywhere = may_be or (self._compares_all and not self._is_known)
            if weight is self._turn:
                self._turn_value = _value(weight).clone()
            is_turn = weight is self._turn and not self._is_turn_known
            if not (everywhere or is_turn or weight.newest is not None):  # the newest are few
                return
            rows = None if everywhere else weight.newest
            value = _value(weight, rows)
        weight.copies.to_host(value, partial(_refuse_other, weight, rows))
        weight.value_version = weight.parameter._version


def _refuse_other(
    weight: Weight, rows: Optional[torch.Tensor], value: Optional[torch.Tensor]
) -> None:
    """Raises NotSupportedError unless a weight, or some of its rows, are the servers'."""
    assert value is not None
    if _differs(weight, rows, value):
        raise NotSupportedError(
            f"the script has written to the weight '{weight.name}', and the next step would undo "
            "it: servers keep the weights from the moment at which p3kv.torch.Optimizer is made. "
            "Load and initialise weights before, or make a new p3kv.torch.Optimizer afterwards; or "
            "set P3KV_UPDATES=workers, by which each worker has its own"
        )


def _lost(weight: Weight) -> NotSupportedError:
    return NotSupportedError(
        f"the script has written to the weight '{weight.name}' between backward and step, for the "
        "first time after the first step: its gradient has left, and the servers' next value would "
        "undo it. Write before backward or after step(), or set P3KV_UPDATES=workers, by which "
        "each worker has its own"
    )


def _refuse_lost(weight: Weight, before: torch.Tensor, value: Optional[torch.Tensor]) -> None:
    """Raises NotSupportedError unless a weight is what it was when its gradient was complete."""
    assert value is not None
    if not torch.equal(bits(value), bits(before.cpu().contiguous())):
        raise _lost(weight)


def is_written(weight: Weight) -> bool:
    """Whether a weight is another one than the servers'. No other value may be under way."""
    if weight.is_table:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return _differs(weight, None, _value(weight).cpu().contiguous())


def copied(weight: Weight) -> Unpushed:
    """A copy, for a checkpoint, of a weight to which no gradient brings another value."""
    with torch._C.DisableTorchFunctionSubclass():
        value: Future[np.ndarray] = Future()
        copy = _value(weight).to("cpu", copy=True, memory_format=torch.contiguous_format)
        value.set_result(array_of(copy))
        shape = tuple(weight.parameter.shape)
        return Unpushed(weight.tensor, weight.name, shape, weight.key.dtype, value)


def _value(weight: Weight, rows: Optional[torch.Tensor] = None) -> torch.Tensor:
    value = weight.parameter.detach()
    return value if rows is None else value.index_select(0, weight.copies.to_device(rows))


def _differs(weight: Weight, rows: Optional[torch.Tensor], value: torch.Tensor) -> bool:
    """Whether a value in the host's memory is another one than the servers'."""
    known = weight.staging if rows is None else weight.staging.index_select(0, rows)
    return not torch.equal(bits(value), bits(known))
