"""Addresses of hosts, IPv4 and IPv6: from names, from interfaces, and as people write them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import List, Optional, Tuple

ANY_PORT = 9
"""For questions about routes: nothing is sent there."""
_SIOCGIFADDR = 0x8915
_INTERFACES = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = 0x00
_UNUSABLE = 0x08 | 0x40
"""Flags of an address that another host has, too, and of one that may turn out to be so."""


def bare(host: str) -> str:
    """A host without the brackets that an IPv6 address has where a port may follow it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def endpoint(host: str, port: int) -> str:
    """A host, name or address, and a port as people and ZeroMQ write them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address, which is no name."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Whether a host is this one for whoever says it: `localhost`, 127.0.0.0/8, or ::1."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def addresses(host: str) -> List[str]:
    """The addresses that a name means on this host, IPv4 first; an address means itself.

    IPv4 goes first wherever processes choose, so all of a job choose alike. Raises OSError for a
    name that is not known here.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no name of a host can be {host!a}: {error}") from error
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def route(host: str) -> Tuple[str, str]:
    """The first address of a host to which this host has a route, and its own address on that
    route. Raises OSError if there is none."""
    problem: Optional[OSError] = None
    for address in addresses(host):
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, ANY_PORT))  # sends nothing; picks the route
                return address, str(probe.getsockname()[0])
            except OSError as error:
                problem = problem or error
    raise problem or OSError(f"{host} has no address")


def of_interface(interface: str) -> str:
    """The address of an interface, IPv4 if it has one. Raises OSError if it has none that other
    hosts can reach."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            for address in _ipv6_of_interface(interface):
                return address
            raise


def interface_of(address: str) -> Optional[str]:
    """The interface of this host that has an address; None if there is none."""
    for _, interface in socket.if_nameindex():
        with suppress(OSError):
            if of_interface(interface) == address:
                return interface
    return None


def _ipv6_of_interface(interface: str) -> List[str]:
    with suppress(OSError):  # a kernel without IPv6
        lines = [line.split() for line in _INTERFACES.read_text().splitlines()]
        return [
            socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            for digits, _, _, scope, flags, name in lines
            if name == interface
            and int(scope, 16) == _GLOBAL_SCOPE
            and not int(flags, 16) & _UNUSABLE
        ]
    return []
