"""Ranks of several hosts agree on their job's address and secret, over a store of their launcher's.

Rank 0 makes both anew for each start of the job: a launcher that starts its ranks again keeps the
store, with what the ranks of earlier starts have written, and no count of its starts is the same on
all hosts. So each start has a token. Rank 0 names its token, the others show under it that they are
there, and then rank 0 decides. A rank that has found an earlier start's token sees that the
decision is not for it, and goes on to the token that came next. Nobody asks again and again: for
each token there will be a decision, and rank 0's next start decides where the last one has not.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

from p3kv import config
from p3kv.common.addresses import addresses, endpoint, family_of, is_loopback, route
from p3kv.common.log import Reminder
from p3kv.common.secret import SECRET_BYTES, VARIABLE
from p3kv.config import Launch
from p3kv.config.ranks import PORTS, LauncherStore
from p3kv.errors import ConfigError, P3Error, RendezvousError, in_one_line
from p3kv.frontends import FRONT_ENDS
from p3kv.frontends.front_end import KeyStore
from p3kv.wire.address import own_address

_log = logging.getLogger(__name__)
_TOKEN = "p3kv/token"
"""Key of the last start's token."""
_NONCE_BYTES = 16
_UNDECIDED = "{}"
"""The decision of a start that has come to none."""
_TRIES = 100
_MOST_NAMED = 8


def meet() -> None:
    """Agree with the other ranks on the job's address and secret, if the launcher serves a store.

    Raises RendezvousError if a rank or the store does not answer, and ConfigError where only some
    ranks have a secret.
    """
    where = config.launcher_store()
    if where is None:
        return
    try:
        with _reminding(where):
            store = _connected(where)
            if store is None:
                return
            decision = lead(store, where) if where.rank == 0 else follow(store, where)
    except P3Error:
        raise
    except (RuntimeError, OSError) as error:
        raise RendezvousError(
            f"rank {where.rank} of {where.size} can't agree with the others on an address and a "
            f"secret, over the store that {where.launcher} serves at "
            f"{endpoint(where.host, where.port)}: {in_one_line(error)}. See the output of rank 0; "
            "all hosts must reach that address. Or set DMLC_PS_ROOT_URI to the address of rank "
            f"0's host and {VARIABLE} to the same text, in all processes"
        ) from error
    if decision["wrong"]:
        raise ConfigError(decision["wrong"])
    config.take_place(decision["host"], decision["port"], decision["secret"], decision["token"])


@contextmanager
def _reminding(where: LauncherStore) -> Iterator[None]:
    """Warn from a thread of its own while what is done inside waits and says nothing itself."""
    done = threading.Event()
    waiting = (
        f"p3kv: rank {where.rank} of {where.size} still waits for the others, over the store that "
        f"{where.launcher} serves at {endpoint(where.host, where.port)}. All hosts must reach that "
        "address; where torchrun names it wrongly, give it --local-addr on each host"
    )

    def watch() -> None:
        reminder = Reminder(time.monotonic())
        while not done.wait(reminder.at - time.monotonic()):
            if reminder.is_due(time.monotonic()):
                _log.warning("%s", waiting)

    threading.Thread(target=watch, name="p3kv reminder", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _connected(where: LauncherStore) -> Optional[KeyStore]:
    timeout_s = config.current().rendezvous_timeout_s
    found = (one.launcher_store(where.host, where.port, timeout_s) for one in FRONT_ENDS)
    return next((one for one in found if one is not None), None)


def lead(store: KeyStore, where: LauncherStore) -> Dict[str, str]:
    """Rank 0: begin a start, wait for all others, decide where the job is; "wrong" says that only
    some ranks have a secret. RendezvousError if a rank does not come."""
    token = secrets.token_hex(_NONCE_BYTES)
    if store.check([_TOKEN]):
        last = store.get(_TOKEN).decode()
        store.compare_set(_decision(last), "", _UNDECIDED)
        store.set(_next(last), token)
    store.set(_TOKEN, token)
    others = range(1, where.size)
    _wait(store, token, others)
    shown = {rank: json.loads(store.get(_shown(token, rank))) for rank in others}
    host = _address([one["address"] for one in shown.values()])
    has_secret = config.where_secret_is() is not None
    decision = {
        "token": token,
        "host": host,
        "port": str(config.root_port() or _free_port(host)),
        # What the user has set does not travel.
        "secret": "" if has_secret else secrets.token_hex(SECRET_BYTES),
        "wrong": _differing({0: has_secret, **{rank: it["secret"] for rank, it in shown.items()}}),
    }
    nonces = {rank: one["nonce"] for rank, one in shown.items()}
    store.set(_decision(token), json.dumps({**decision, "nonces": nonces}))
    return decision


def _wait(store: KeyStore, token: str, ranks: range) -> None:
    try:
        store.wait([_shown(token, rank) for rank in ranks])
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([_shown(token, rank)])]
        if not missing:
            return
        raise RendezvousError(
            f"rank 0 has waited {config.current().rendezvous_timeout_s:g} s "
            f"(P3KV_RENDEZVOUS_TIMEOUT_S) for {_named(missing)}: see "
            "their output. They must 'import p3kv' first, in the same version"
        ) from error


def follow(store: KeyStore, where: LauncherStore) -> Dict[str, str]:
    """Another rank: shows that it is there, and waits for rank 0's decision."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    has_secret = config.where_secret_is() is not None
    shown = json.dumps({"nonce": nonce, "address": _own_address(where.host), "secret": has_secret})
    token = store.get(_TOKEN).decode()
    while True:
        store.set(_shown(token, where.rank), shown)
        decision: Dict = json.loads(store.get(_decision(token)))
        if decision.get("nonces", {}).get(str(where.rank)) == nonce:
            return decision
        token = store.get(_next(token)).decode()  # that was an earlier start


def _address(others: List[str]) -> str:
    """The address at which the scheduler listens: that from which rank 0 reaches another host."""
    own = config.root_host()
    if own:
        return own
    elsewhere = next((one for one in others if not is_loopback(one)), others[0])
    return _own_address(elsewhere)


def _own_address(towards: str) -> str:
    launch = Launch.of_a_worker(towards)
    if launch.node_host or launch.interface:
        return own_address(launch)
    return route(towards)[1]


def _free_port(host: str) -> str:
    """A port that is free at an address of this host, and that Linux gives nobody by itself."""
    address = addresses(host)[0]
    for _ in range(_TRIES):
        port = secrets.choice(PORTS)
        try:
            socket.create_server((address, port), family=family_of(address)).close()
        except OSError as error:
            problem = error
        else:
            return str(port)
    raise problem


def _differing(have_secret: Dict[int, bool]) -> str:
    """Say that only some ranks have a secret; empty if all are alike."""
    has, has_none = ([one for one, it in have_secret.items() if it is has] for has in (True, False))
    if not has or not has_none:
        return ""
    return (
        f"{_named(has)} with a secret ({VARIABLE} or {VARIABLE}_FILE), and {_named(has_none)} "
        "without: set the same in all processes, or in none: then rank 0 makes one for each start"
    )


def _named(ranks: List[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


def _shown(token: str, rank: int) -> str:
    return f"p3kv/{token}/{rank}"


def _decision(token: str) -> str:
    return f"p3kv/{token}/decision"


def _next(token: str) -> str:
    return f"p3kv/{token}/next"
