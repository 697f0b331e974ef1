"""Calls that MXNet's own stores have, and the p3 store refuses or need not be given."""

from __future__ import annotations

from typing import NoReturn

from p3kv.errors import NotSupportedError

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
