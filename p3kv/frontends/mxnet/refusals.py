"""What scripts are refused that call MXNet's stores, and in which words."""

from __future__ import annotations

from typing import Any, NoReturn, Sequence, Tuple

import mxnet as mx

from p3kv import errors
from p3kv.errors import NotSupportedError


class KeyMismatchError(errors.KeyMismatchError, mx.base.MXNetError):
    """A key is unknown or declared twice, or an array does not fit it."""


_SET_MULTI_PRECISION, _SYNC_MODE = 1, 3
"""Commands of MXNet's that p3kv need not be given: the first one's number travels with the
optimizer, and servers know by each store whether it is synchronous."""
_INSTEAD_OF_COMMANDS = {
    0: "nothing that arrives is unpickled; use kv.set_optimizer",
    2: "they end with the job",
    _SYNC_MODE: "use kvstore='p3'",
    4: "use kv.set_gradient_compression",
    5: "MXNet's profiler does not run there; P3KV_TRACE writes a trace of every process",
}
"""By the numbers of MXNet's commands (`mxnet/kvstore/kvstore.py`): what to do."""


def refuse_handle() -> NoReturn:
    """For MXNet's profiler, which needs a native store."""
    raise AttributeError(
        "the p3 store has no handle, since it is none of MXNet's native stores. For a profile "
        "of the servers, set P3KV_TRACE: every process writes a trace"
    )


def refuse_updater() -> NoReturn:
    """For an updater function, which MXNet's own distributed stores take and never call."""
    raise NotSupportedError(
        "an updater function can't run on the servers; use kv.set_optimizer, or set neither: "
        "kv.pushpull then gives the sums of all workers' gradients, and the script updates"
    )


def check_command(head: int, body: str, asynchronous: bool) -> None:
    """Raises NotSupportedError for a command to the servers, unless they do it anyway."""
    if head != _SET_MULTI_PRECISION and (head != _SYNC_MODE or asynchronous):
        instead = _INSTEAD_OF_COMMANDS.get(head, "they take no commands of a script's own")
        raise NotSupportedError(f"the servers can't run command {head} ({body!r:.40}): {instead}")


def refuse_part_of_a_step(keys: Any) -> NoReturn:
    """Raises NotSupportedError: the call's keys are of a step that was clipped without them."""
    raise NotSupportedError(
        f"key {keys!r} is pushed after a step has been clipped without it. With "
        "kv.clip_global_norm each call of push or pushpull is a whole step: give it the lists of "
        "all keys and gradients. gluon's Trainer and Module need nothing"
    )


def check_apart(known: Sequence[Tuple[Any, ...]]) -> None:
    """Raises NotSupportedError where the new value of a key is to be written into an array that
    another key of the step needs, too: the second operation would wait for the first, and the first
    for the gradients of the step.

    `known`: keys with their sources and their targets.
    """
    written = {id(target): key for key, _, targets in known for target in targets}
    for key, sources, targets in known:
        if any(written.get(id(array), key) is not key for array in (*sources, *targets)):
            raise NotSupportedError(
                f"{key.called} and another key of the call have an array in common, into which a "
                "new value is to be written. With kv.clip_global_norm no value comes before all "
                "gradients of the step: give each key arrays of its own"
            )
