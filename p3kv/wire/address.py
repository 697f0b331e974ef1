"""The addresses at which a job's processes reach each other, and whose process listens at one."""

from __future__ import annotations

import os
import pwd
import socket
from contextlib import suppress
from typing import Optional, Set

from p3kv.common.addresses import addresses, endpoint, is_loopback, of_interface, route
from p3kv.config import Launch
from p3kv.errors import ConfigError, RendezvousError


def own_address(launch: Launch) -> str:
    """The address to listen on: DMLC_NODE_HOST, that of DMLC_INTERFACE, or else the one from
    which this host reaches the scheduler.

    Raises ConfigError for an interface without an address and for a name of the scheduler's host
    that only this host knows, RendezvousError when there is no way to the scheduler.
    """
    if launch.node_host:
        with suppress(OSError):  # whoever listens there says what is wrong
            return addresses(launch.node_host)[0]
        return launch.node_host
    if launch.interface:
        return _interface_address(launch.interface)
    try:
        peer, own = route(launch.root_host)
    except OSError as error:
        raise RendezvousError(
            "this host finds no way to the scheduler at "
            f"{endpoint(launch.root_host, launch.root_port)}: {error.strerror or error}. "
            f"Set {launch.variables.host} to its address."
        ) from error
    _refuse_own_name(launch, peer)
    return own


def scheduler_address(launch: Launch) -> str:
    """Where this process connects to the scheduler, as ZeroMQ writes it. A name that is not known
    yet stays: ZeroMQ asks for it again."""
    host = launch.root_host
    with suppress(OSError):
        host = route(host)[0]
    return endpoint(host, launch.root_port)


def listening_address(launch: Launch) -> str:
    """The address at which the scheduler listens. A name is replaced by what it means here. Raises
    ConfigError for a name that means an address which other hosts can't reach."""
    try:
        meant = addresses(launch.root_host)
    except OSError:
        return launch.root_host  # an interface, perhaps; whoever listens says so if it is none
    address = next(filter(_is_own, meant), meant[0])
    _refuse_own_name(launch, address)
    return address


def _is_own(address: str) -> bool:
    """Whether this host has the address."""
    with suppress(OSError):
        return route(address)[1] == address
    return False


def _refuse_own_name(launch: Launch, address: str) -> None:
    if is_loopback(address) and not is_loopback(launch.root_host):
        raise ConfigError(
            f"the scheduler's host is '{launch.root_host}', which on this host means {address}: "
            f"others can't reach that. Set {launch.variables.host} to the host's address in the "
            "job's network, or mend /etc/hosts here."
        )


def _interface_address(interface: str) -> str:
    try:
        return of_interface(interface)
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"DMLC_INTERFACE is '{interface}', which has no address that others can reach: "
            f"{error.strerror}. This host has {names}."
        ) from error


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
