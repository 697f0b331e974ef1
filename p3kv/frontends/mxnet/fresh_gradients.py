"""Gradients that a step of gluon's Trainer pushes: those that backward has written since the last.

MXNet notes with each weight whether backward has written its gradient. Where no worker has a fresh
gradient of a parameter, its weight stays as it is; else the sum is over those that are fresh. So
the numbers are those of one process that trains on the joined batches.
"""

from __future__ import annotations

import ctypes
from typing import Callable, List, NamedTuple, Optional, Tuple, Union

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet.alone import Alone
from p3kv.frontends.mxnet.arrays import DENSE
from p3kv.frontends.mxnet.store import P3

_REFUSES, _STALE = "_p3kv_refuses_stale", "_p3kv_stale"
"""Attributes of a Trainer: whether the step under way raises for a stale gradient; and which were
stale on this worker when the last sums were made, until weights are updated with them."""

# These calls are short and keep the GIL, as those of `engine.py`.
_keeping_gil = ctypes.PyDLL(_LIB._name)


class _Gradient(NamedTuple):
    """A parameter's gradients in a step, with an array for each device."""

    key: int
    parameter: mx.gluon.Parameter
    weights: List[NDArray]
    gradients: List[NDArray]
    fresh: List[NDArray]
    """Gradients that backward has written since the last step."""
    stale_on: Optional[mx.Context]
    """The first device on which backward has not."""


def refusing_stale(trainer: mx.gluon.Trainer, ignore: bool, step: Callable[[], None]) -> None:
    """Runs a step that raises for a stale gradient unless they are to be ignored."""
    setattr(trainer, _REFUSES, not ignore)
    try:
        step()
    finally:
        setattr(trainer, _REFUSES, False)


def push(trainer: mx.gluon.Trainer, store: Union[P3, Alone]) -> None:
    """Pushes a step's fresh gradients, and says of the others that there is none.

    Where servers update, nothing is fresh afterwards. Where workers do, gradients are fresh that
    any worker has; if this one has none of a parameter, it waits for the round's end to know.
    Raises UserWarning as MXNet does, before anything is pushed, in a step that ignores nothing.
    """
    gradients, all_fresh = _of(trainer)
    if not all_fresh and getattr(trainer, _REFUSES, False):
        _refuse(gradients)
    servers_update = bool(trainer._update_on_kvstore)
    ends = []
    with store.one_step(None if all_fresh else [one.key for one in gradients if one.fresh]):
        for one in gradients:
            out = one.weights if servers_update else one.gradients
            sparse = one.gradients[0].stype != DENSE
            if not one.fresh:
                ends.append(
                    (one, store.push_no_gradient(one.key, None if sparse else out, -one.key))
                )
            elif sparse:
                store.push(one.key, one.fresh, priority=-one.key)
            else:
                store.pushpull(one.key, one.fresh, out=out, priority=-one.key)
            if sparse and one.parameter._stype == DENSE:
                store.pull(one.key, out, priority=-one.key, ignore_sparse=trainer._distributed)
    if servers_update:
        for one in gradients:
            _mark(one.weights, False)
        return
    setattr(trainer, _STALE, [one for one in gradients if one.stale_on is not None])
    for one in gradients:
        if one.fresh and one.stale_on is not None:
            _mark(one.weights, True)
    for one, any_fresh in ends:
        if any_fresh():
            _mark(one.weights, True)


def check_update(trainer: mx.gluon.Trainer, ignore: bool) -> None:
    """Raises UserWarning for what was stale here when the gradients were summed, though other
    workers may have had some; before the workers update, unless that is to be ignored."""
    stale = getattr(trainer, _STALE, [])
    setattr(trainer, _STALE, [])
    if not ignore:
        _refuse(stale)


def _of(trainer: mx.gluon.Trainer) -> Tuple[List[_Gradient], bool]:
    """The gradients of all parameters that are trained, and whether all are fresh."""
    found, all_fresh = [], True
    for key, parameter in enumerate(trainer._params):
        if parameter.grad_req == "null":
            continue
        weights = parameter._check_and_get(parameter._data, list)
        gradients = parameter.list_grad()
        fresh, stale_on = [], None
        for weight, gradient in zip(weights, gradients):
            if _is_fresh(weight):
                fresh.append(gradient)
            else:
                stale_on = weight.context if stale_on is None else stale_on
                all_fresh = False
        found.append(_Gradient(key, parameter, weights, gradients, fresh, stale_on))
    return found, all_fresh


def _refuse(gradients: List[_Gradient]) -> None:
    """Raises UserWarning, as MXNet does, if any of them is stale on one of the devices."""
    for one in gradients:
        if one.stale_on is not None:
            raise UserWarning(
                f"Gradient of Parameter `{one.parameter.name}` on context {one.stale_on} has not "
                "been updated by backward since last `step`. This could mean a bug in your model "
                "that made it only use a subset of the Parameters (Blocks) for this iteration. If "
                "you are intentionally only using a subset, call step with ignore_stale_grad=True "
                "to suppress this warning and skip updating of Parameters with stale gradient"
            )


def _is_fresh(weight: NDArray) -> bool:
    state = ctypes.c_int()
    check_call(_keeping_gil.MXNDArrayGetGradState(weight.handle, ctypes.byref(state)))
    return bool(state.value)


def _mark(weights: List[NDArray], fresh: bool) -> None:
    for weight in weights:
        check_call(_keeping_gil.MXNDArraySetGradState(weight.handle, ctypes.c_int(fresh)))
