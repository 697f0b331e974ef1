"""The hosts of a job over ssh: how a user names them, and how the others reach the first."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from typing import NamedTuple, Sequence

from p3kv.common.addresses import addresses, is_loopback, route
from p3kv.errors import ConfigError

_SYNTAX = re.compile(
    r"(?P<host>(?P<user>[\w.-]+@)?(?:\[(?P<ipv6>[\da-fA-F:.]+)\]|(?P<name>[\w.-]+)))"
    r"(?::(?P<workers>\d{1,4}))?",
    re.ASCII,
)


class Host(NamedTuple):
    """A host of a job: `name` is what ssh gets, with a user before an @ if need be."""

    name: str
    workers: int


def parse_hosts(text: str) -> list[Host]:
    """Reads "host1,host2:2,[fd00::3]:2": hosts, with how many workers each has after a colon
    (default 1).

    Raises ConfigError for anything else, and for a host that comes twice.
    """
    hosts: list[Host] = []
    for word in text.split(","):
        word = word.strip()
        found = _SYNTAX.fullmatch(word)
        workers = int(found["workers"] or 1) if found else 0
        if found is None or workers < 1 or word.startswith("-"):
            raise ConfigError(
                f"'{word}' is no host; write host names or addresses with commas between, IPv6 "
                "addresses in brackets, and the number of workers after a colon if it is not 1: "
                "host1,host2:2,[fd00::3]:2"
            )
        name = (found["user"] or "") + (found["ipv6"] or found["name"])
        if name in [host.name for host in hosts]:
            once = word[: found.end("host")]
            raise ConfigError(f"the host '{name}' comes twice; write {once}:2")
        hosts.append(Host(name, workers))
    return hosts


def in_turn(hosts: Sequence[Host], count: int) -> list[Host]:
    """The hosts of `count` processes that are spread as workers are: all hosts take turns, each as
    often as it has workers, then from the beginning."""
    most = max(host.workers for host in hosts)
    turns = [host for turn in range(most) for host in hosts if turn < host.workers]
    return [turns[i % len(turns)] for i in range(count)]


def address_of_first(hosts: Sequence[Host]) -> str:
    """An address of the first host that the others reach, as far as can be known here.

    That is what ssh connects to. On the first host itself its name often means 127.0.0.1 or, on
    Debian and Ubuntu, 127.0.1.1: then it is the address from which this host reaches the second.
    A name that only the hosts know is returned as it is.
    """
    name = _name_for_ssh(hosts[0])
    try:
        address = addresses(name)[0]
    except OSError:
        return name
    if is_loopback(address) and len(hosts) > 1:
        with suppress(OSError):
            return route(_name_for_ssh(hosts[1]))[1]
    return address


def _name_for_ssh(host: Host) -> str:
    """The name or address that ssh connects to, which its configuration may replace."""
    with suppress(OSError):
        told = subprocess.run(["ssh", "-G", host.name], capture_output=True, text=True, check=False)
        for line in told.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname":
                return value
    return host.name.rpartition("@")[2]
