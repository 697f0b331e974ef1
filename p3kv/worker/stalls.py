"""Warnings that a worker logs when a round waits: for a straggler, or for a silent server."""

from __future__ import annotations

import logging
import math
from typing import Dict, Mapping, NamedTuple, Optional, Tuple

from msgspec import structs

from p3kv.config import Settings
from p3kv.wire.connection import Connection
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Stalled, waited, workers
from p3kv.wire.silence import OwnPauses
from p3kv.worker.exchange import Exchange
from p3kv.worker.transfers import Transfer, WorkerKey

LOOK_EVERY_S = 1.0
"""How often `look` is to be called."""
_LATE_S = 3.0
"""By how much a server's own words may be late."""

_log = logging.getLogger(__name__)


class _Told(NamedTuple):
    """What a server has said, and when."""

    stalled: Stalled
    at_s: float


class StallWarnings:
    """Warns of rounds that wait, once for all servers that report them.

    Servers report a round for which some have pushed and others have not. Workers that train by
    themselves go on meanwhile, and so does what they wait for: a worker warns of such a round when
    its script has waited for the value as long as others wait before they are told.
    """

    def __init__(
        self, rank: int, keys: Mapping[int, WorkerKey], exchange: Exchange, first_s: float
    ) -> None:
        """`first_s`: a script that has waited for less has not waited."""
        self._rank = rank
        self._keys = keys
        self._exchange = exchange
        self._first_s = first_s
        self._not_awaited: Dict[int, _Told] = {}
        """By key."""
        self._warned_at_s: Dict[Tuple[int, ...], float] = {}
        """By the workers that are missing: if two workers wait for each other, both are logged."""

    def note(self, stalled: Stalled, now_s: float) -> None:
        """Takes note of what a server says, and warns if that is new."""
        key = self._keys.get(stalled.key_id)
        if key is None or not key.goes_on or stalled.round == INITIAL_ROUND:
            self._warn(stalled, now_s)
        else:
            self._not_awaited[stalled.key_id] = _Told(stalled, now_s)
            self.look(now_s)

    def forget(self, key_id: int) -> None:
        """Nobody waits for a key any more."""
        self._not_awaited.pop(key_id, None)

    def look(self, now_s: float) -> None:
        """Warns of what the script has come to wait for."""
        for key_id, (stalled, at_s) in list(self._not_awaited.items()):
            key = self._keys[key_id]
            pushed = key.channel.begun >= stalled.round
            if pushed and self._exchange.update(key_id, stalled.round) is None:
                del self._not_awaited[key_id]  # the value has come
                continue
            since_s = self._exchange.awaited_since_s(key, stalled.round)
            waited_s = 0.0 if since_s is None else now_s - since_s
            if waited_s >= self._first_s:
                del self._not_awaited[key_id]  # the server tells again
                left_s = max(0.0, stalled.timeout_s - stalled.waited_s - (now_s - at_s))
                timeout_s = waited_s + left_s
                self._warn(structs.replace(stalled, waited_s=waited_s, timeout_s=timeout_s), now_s)

    def _warn(self, stalled: Stalled, now_s: float) -> None:
        # Each server reports for itself, and again when the wait has doubled.
        missing = tuple(stalled.missing)
        if now_s - self._warned_at_s.get(missing, -math.inf) < stalled.waited_s / 2:
            return
        self._warned_at_s[missing] = now_s
        _log.warning("%s", _words(stalled, self._rank, self._keys.get(stalled.key_id)))


def _words(stalled: Stalled, rank: int, key: Optional[WorkerKey]) -> str:
    missing = workers(stalled.missing)
    have, its = ("has", "Its") if len(stalled.missing) == 1 else ("have", "Their")
    if stalled.round == INITIAL_ROUND:
        what = f"{missing} {have} not given {stalled.called} its initial value"
    else:
        what = f"{missing} {have} not pushed {stalled.called} in round {stalled.round}"
    advice = "All workers must train the same parameters, the same number of times."
    if rank not in stalled.missing:
        why = f"{its} own output may say why. {advice}"
    elif key is None:
        why = f"That is this worker, which does not have it. {advice}"
    elif INITIAL_ROUND < stalled.round <= key.channel.begun:
        why = "This worker has pushed it: it is on its way, or waits for the sum of this host's."
    else:
        why = f"That is this worker. {advice}"
    left_s = max(0, math.floor(stalled.timeout_s - stalled.waited_s))
    return (
        f"{what}, {waited(stalled.arrived, stalled.waited_s)}. {why} The job ends if nothing comes "
        f"for another {left_s} s (P3KV_STALL_TIMEOUT_S)."
    )


class _Wait(NamedTuple):
    """The oldest transfer that is awaited."""

    key_id: int
    round: int
    step: int


class Silences:
    """Looks at how many bytes move on the connections while the oldest transfer waits.

    A process may answer the scheduler and its data connections still carry nothing, for example
    behind a firewall that has forgotten them. A server that waits for another worker says so, at
    times that double, so it is not silent. Warns after `warn_after_s`, and whenever that time has
    doubled; after `stall_timeout_s` it ends the connection. After a pause of the worker's own the
    wait begins anew. Belongs to the worker's thread.
    """

    def __init__(
        self, settings: Settings, servers: Mapping[int, Connection], exchange: Exchange
    ) -> None:
        self._settings = settings
        self._servers = servers
        self._exchange = exchange
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
        transfer, servers = self._exchange.oldest() or (None, ())
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
                self._servers[server].end(f"{_silence(transfer, silent_s)} (P3KV_STALL_TIMEOUT_S)")
            elif is_due and silent_s > waited_s / 2 + _LATE_S:
                self._told_s = waited_s
                _log.warning(
                    "server %d: %s. The network between may have lost the connection. The job goes "
                    "on when something comes, and ends if nothing does for %.0f s "
                    "(P3KV_STALL_TIMEOUT_S).",
                    server, _silence(transfer, silent_s), self._settings.stall_timeout_s,
                )  # fmt: skip

    def _is_due(self, waited_s: float) -> bool:
        first_s = min(self._settings.warn_after_s, self._settings.stall_timeout_s / 2)
        return waited_s >= max(first_s, 2 * self._told_s)


def _silence(transfer: Transfer, silent_s: float) -> str:
    return (
        f"nothing has moved on its connection for {math.floor(silent_s)} s, and "
        f"{transfer.key.called} in round {transfer.round} is still to come"
    )
