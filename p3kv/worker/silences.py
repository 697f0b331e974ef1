"""Servers that say nothing while this worker waits for what they have: told, and at last ended.

A process may answer the scheduler and its data connections still carry nothing, for example behind
a firewall that has forgotten them. A server that waits for another worker says so (`Stalled`), at
times that double, so it is not silent.
"""

from __future__ import annotations

import logging
import math
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Set, Tuple

from p3kv.config import Settings
from p3kv.wire.connection import Connection
from p3kv.wire.silence import OwnPauses
from p3kv.worker.transfers import Transfer

LOOK_EVERY_S = 1.0
"""How often `look` is to be called."""
_LATE_S = 3.0
"""By how much a server's own words may be late."""

_log = logging.getLogger(__name__)

Awaited = Optional[Tuple[Transfer, Set[int]]]
"""A transfer, and the servers from which something of it is still to come."""


class _Wait(NamedTuple):
    """The oldest transfer that is awaited."""

    key_id: int
    round: int
    step: int


class Silences:
    """Looks at how many bytes move on the connections while the oldest transfer waits.

    Warns after `warn_after_s`, and whenever that time has doubled; after `stall_timeout_s` it ends
    the connection. After a pause of the worker's own the wait begins anew. Belongs to the worker's
    thread.
    """

    def __init__(
        self,
        settings: Settings,
        servers: Mapping[int, Connection],
        awaited: Callable[[], Awaited],
    ) -> None:
        self._settings = settings
        self._servers = servers
        self._awaited = awaited
        self._moved: Dict[int, Tuple[int, float]] = {}
        """By server: the bytes that have moved on its connection, and since when no more have."""
        self._wait: Optional[_Wait] = None
        self._own_pauses = OwnPauses(LOOK_EVERY_S)
        self._since_s = self._told_s = 0.0

    def look(self, now_s: float) -> None:
        """Warns, or ends connections, if it is time; `now_s` is of the monotonic clock."""
        pause_s = self._own_pauses.look(now_s)
        for server, connection in self._servers.items():
            moved_bytes = connection.moved_bytes
            if moved_bytes != self._moved.get(server, (-1, 0.0))[0]:
                self._moved[server] = (moved_bytes, now_s)
        transfer, servers = self._awaited() or (None, set())
        if transfer is None:
            self._wait = None
            return
        wait = _Wait(transfer.key.key_id, transfer.round, transfer.step)
        if wait != self._wait or pause_s:
            self._wait, self._since_s, self._told_s = wait, now_s, 0.0
        waited_s = now_s - self._since_s
        is_due = self._is_due(waited_s)
        for server in sorted(servers):
            silent_s = now_s - max(self._since_s, self._moved[server][1])
            if silent_s >= self._settings.stall_timeout_s:
                self._servers[server].end(f"{_words(transfer, silent_s)} (P3KV_STALL_TIMEOUT_S)")
            elif is_due and silent_s > waited_s / 2 + _LATE_S:
                self._told_s = waited_s
                _log.warning(
                    "server %d: %s. The network between may have lost the connection. The job goes "
                    "on when something comes, and ends if nothing does for %.0f s "
                    "(P3KV_STALL_TIMEOUT_S).",
                    server, _words(transfer, silent_s), self._settings.stall_timeout_s,
                )  # fmt: skip

    def _is_due(self, waited_s: float) -> bool:
        first_s = min(self._settings.warn_after_s, self._settings.stall_timeout_s / 2)
        return waited_s >= max(first_s, 2 * self._told_s)


def _words(transfer: Transfer, silent_s: float) -> str:
    return (
        f"nothing has moved on its connection for {math.floor(silent_s)} s, and "
        f"{transfer.key.called} in round {transfer.round} is still to come"
    )
