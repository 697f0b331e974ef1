"""Account of this process, and of who listens at a port of this machine; for messages.

The system's tables of TCP sockets may be read a moment too late, so they decide nothing: who may
join is for the credentials to decide.
"""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from typing import Optional, Set

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"


def own_account() -> str:
    """This process's account."""
    return _named(os.geteuid())


def other_account_at(port: int) -> Optional[str]:
    """The account whose process listens at a port of this machine; None if it is this process's,
    or is not known."""
    users = _listening_at(port)
    return _named(users.pop()) if len(users) == 1 and os.geteuid() not in users else None


def _listening_at(port: int) -> Set[int]:
    users = set()
    for name in _TABLES:
        with suppress(OSError), open(name, encoding="ascii") as table:
            for line in list(table)[1:]:
                _, here, _, state, _, _, _, uid, *_ = line.split()
                if (state, int(here.rpartition(":")[2], 16)) == (_LISTEN, port):
                    users.add(int(uid))
    return users


def _named(uid: int) -> str:
    with suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
