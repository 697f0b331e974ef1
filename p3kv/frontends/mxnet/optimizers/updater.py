"""Attribute `_updater`, in which scripts of MXNet's look for a store's optimizer."""

from __future__ import annotations

from typing import Any, Callable, Dict, NoReturn

import mxnet as mx

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import who_updates
from p3kv.wire.messages import Key


class ServersUpdater:
    """The optimizer of the servers, as the attributes of MXNet's Updater show it.

    gluon's Trainer takes `optimizer` from here when it has loaded states. Belongs to the script's
    thread.
    """

    def __init__(
        self, optimizer: mx.optimizer.Optimizer, fetch: Callable[[], Dict[Key, Any]]
    ) -> None:
        """`fetch` asks the servers for all states."""
        self.optimizer = optimizer
        """The script's own; what it changes here holds from the next step on."""
        self._fetch = fetch

    @property
    def states(self) -> Dict[Key, Any]:
        """A copy of MXNet's state of each key that was updated, after all of this worker's pushes.

        Raises StatesError where states can't be saved.
        """
        return self._fetch()

    def __call__(self, *_: Any) -> NoReturn:
        raise NotSupportedError(
            "updates run on the servers, not where the script runs; push the gradient to the "
            f"store, or {who_updates.WORKERS}"
        )
