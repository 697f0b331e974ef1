"""The addresses of this host that other processes can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress

from p3kv.config import Launch
from p3kv.errors import ConfigError, RendezvousError

_SIOCGIFADDR = 0x8915


def own_address(launch: Launch) -> str:
    """The address to listen on: DMLC_NODE_HOST, that of DMLC_INTERFACE, or else the one from
    which this host reaches the scheduler.

    Raises ConfigError for an interface without an address, RendezvousError when there is no
    way to the scheduler.
    """
    if launch.node_host:
        return launch.node_host
    if launch.interface:
        return _interface_address(launch.interface)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            launch.root_host, launch.root_port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing; picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"this host finds no way to the scheduler at {launch.root_host}:{launch.root_port}: "
            f"{error.strerror or error}. Check DMLC_PS_ROOT_URI."
        ) from error


def listening_address(host: str) -> str:
    """The address at which the scheduler listens if `host` is what the others know it by.

    A name is replaced by what it means here. Raises ConfigError for a name that means an address
    which other hosts can't reach.
    """
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return host  # an interface, perhaps; whoever listens there says so if it is none
    if host != "localhost" and ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"DMLC_PS_ROOT_URI is '{host}', which on this host means {address}: others can't reach "
            "that. Set it to the host's address in the job's network, or mend /etc/hosts here."
        )
    return address


def _interface_address(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"DMLC_INTERFACE is '{interface}', which has no IPv4 address: "
                f"{error.strerror}. This host has {names}."
            ) from error
    return socket.inet_ntoa(answer[20:24])
