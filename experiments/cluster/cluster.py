"""A throttled cluster on one Linux machine: hosts are network namespaces joined by one switch.

Each host has one link to the switch, limited in both directions. The switch has a namespace of its
own, so the machine's own interfaces, addresses and routes are neither used nor changed. It routes:
through a bridge, a sender's TCP in the same kernel still counts what waits behind the switch as in
its own queue and holds back (TCP small queues), which no sender on a real network can. Needs root
and the tools `ip` and `tc`; `missing_requirements` says what is not there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Iterable, Iterator, NamedTuple

from experiments.cluster.host import Host
from experiments.cluster.netns import (
    CleanupGuard,
    ClusterError,
    InterfaceCounters,
    in_namespace,
    measure_goodput,
    run_tool,
    set_congestion_control,
    tool_path,
)
from experiments.cluster.throttle import bucket, losing

MTU_BYTES = 1500
MAX_HOSTS = 1000  # more were never tried
# TCP payload in an Ethernet frame, with time stamps: what is left of a link's rate.
PAYLOAD_SHARE = (MTU_BYTES - 52) / (MTU_BYTES + 14)
_IPV4 = ipaddress.ip_network("10.77.0.0/16")
_IPV6 = ipaddress.ip_network("fd77::/112")
_UNLIMITED_PACKET_BYTES = 65536
_END_TIMEOUT_S = 3.0

# Ends what runs in the namespaces "$@" and removes them, and with them all that is inside.
_REMOVE = """
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  inside=$(for namespace; do ip netns pids "$namespace" 2>/dev/null; done)
  [ -n "$inside" ] || break
  case $attempt in
    1) kill -s TERM $inside 2>/dev/null ;;
    [6-9]) kill -s KILL $inside 2>/dev/null ;;
  esac
  sleep 0.2
done
status=0
for namespace; do
  [ ! -e "/var/run/netns/$namespace" ] || ip netns del "$namespace" || status=1
  rm -rf "/etc/netns/$namespace" || status=1
done
exit $status
"""


class LinkGoodput(NamedTuple):
    """TCP payload that went from one host to the next, and the slower of the two limits passed."""

    sender: str
    receiver: str
    mbit_s: float
    limit_mbit_s: float | None

    @property
    def expected_mbit_s(self) -> float | None:
        """What the limit leaves for payload; None without a limit."""
        return None if self.limit_mbit_s is None else self.limit_mbit_s * PAYLOAD_SHARE


class Cluster:
    """`host_count` hosts, each behind a link of `rate_mbit_s` (None: unlimited), while entered.

    Rates are Mbit/s of Ethernet frames at MTU 1500. TCP in the hosts uses `congestion_control`,
    whatever the machine's default. With `ipv6`, hosts have IPv6 addresses only. The machine's name
    means each host itself there, as it would if hosts were machines. Everything is removed on
    leaving, and by a small guard process when this process ends in any other way. One thread makes,
    changes and removes a cluster; counters may be read from any. Raises ClusterError, with nothing
    left behind.
    """

    def __init__(
        self,
        host_count: int,
        rate_mbit_s: float | None = None,
        congestion_control: str = "cubic",
        ipv6: bool = False,
    ) -> None:
        if not 1 <= host_count <= MAX_HOSTS:
            raise ClusterError(f"{host_count} hosts: a cluster has 1 to {MAX_HOSTS}")
        # Unique among live processes and among clusters of one process; names of interfaces, of
        # which this is one, have 15 characters at most.
        self.name = f"p3-{os.getpid():x}{secrets.token_hex(3)}"
        self.congestion_control = congestion_control
        self._network = _IPV6 if ipv6 else _IPV4
        self._switch_address = str(self._network[-2])
        self.hosts = [
            Host(i, f"{self.name}-{i}", self.name, str(self._network[i + 1]))
            for i in range(host_count)
        ]
        self._switch = f"{self.name}-switch"
        self._rate_mbit_s = rate_mbit_s
        self._guard: CleanupGuard | None = None
        self._counters: dict[str, InterfaceCounters] = {}

    def __enter__(self) -> Cluster:
        if self._guard is not None:
            raise ClusterError(f"the cluster {self.name} was entered before: make another")
        problem = _missing_tools()
        if problem is not None:
            raise ClusterError(problem)
        namespaces = [self._switch, *(host.namespace for host in self.hosts)]
        self._guard = CleanupGuard(_REMOVE, *namespaces)
        try:
            self._batch("ip", None, [f"netns add {namespace}" for namespace in namespaces])
            self._name_hosts()
            set_congestion_control(namespaces[1:], self.congestion_control)
            if self._network is _IPV4:
                for namespace in namespaces:
                    in_namespace(namespace, _disable_ipv6)
            in_namespace(self._switch, _enable_forwarding)
            self._batch("ip", self._switch, self._switch_commands())
            for host in self.hosts:
                self._batch("ip", host.namespace, self._host_commands(host))
            if self._rate_mbit_s is not None:
                self.set_rate(self._rate_mbit_s)
            for host in self.hosts:
                self._counters[host.name] = InterfaceCounters(host.namespace, host.interface)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that still run and remove the cluster; may be called twice."""
        if self._guard is None:
            return
        try:
            self._end_processes()
        finally:
            for counters in self._counters.values():
                counters.close()
            self._counters.clear()
            self._guard.release()

    def set_rate(self, rate_mbit_s: float | None, host: Host | None = None) -> None:
        """Limit the link of `host`, or all links, in both directions; None removes the limit.

        Connections live on and follow at once. A smaller burst or no limit loses what waits in the
        link's queue.
        """
        limit = None if rate_mbit_s is None else bucket(rate_mbit_s)
        hosts = self.hosts if host is None else [host]
        # A link that had no limit has no qdisc of ours that could be deleted.
        hosts = [host for host in hosts if limit is not None or host.rate_mbit_s is not None]
        # First what senders make, then what links take. The flush makes living connections look.
        packet_bytes = _UNLIMITED_PACKET_BYTES if limit is None else limit.packet_bytes
        for host in hosts:
            resize = f"link set dev {host.interface} gso_max_size {packet_bytes}"
            self._batch("ip", host.namespace, [resize, "route flush cache"])
        changes = [host.limit_command(limit) for host in hosts]
        ports = [f"port{host.index}" for host in hosts]
        self._batch("tc", self._switch, map(str.format, changes, ports))
        for host, change in zip(hosts, changes):
            self._batch("tc", host.namespace, [change.format(host.interface)])
            host.rate_mbit_s = rate_mbit_s

    @contextlib.contextmanager
    def cut(self, host: Host) -> Iterator[None]:
        """Until the context ends, the switch drops all that `host` sends and is sent, and tells
        nobody, as when a cable is pulled between two switches."""
        rules = [f"{way} {host.address} blackhole" for way in ("from", "to")]
        self._batch("ip", self._switch, [f"rule add {rule}" for rule in rules])
        try:
            yield
        finally:
            self._batch("ip", self._switch, [f"rule del {rule}" for rule in rules])

    @contextlib.contextmanager
    def lossy(self, host: Host, share: float) -> Iterator[None]:
        """Until the context ends, `host`'s link loses this share of the packets in each direction,
        at random."""
        ends = [(host.namespace, host.interface), (self._switch, f"port{host.index}")]
        for namespace, device in ends:
            lose = f"filter add dev {device} egress bpf direct-action {losing(share)}"
            self._batch("tc", namespace, [f"qdisc add dev {device} clsact", lose])
        try:
            yield
        finally:
            for namespace, device in ends:
                self._batch("tc", namespace, [f"qdisc del dev {device} clsact"])

    def goodput(self, seconds: float = 0.5, at_once: bool = False) -> list[LinkGoodput]:
        """Measure the TCP payload rate from each host to the next, the last to the first.

        So each link is measured in both directions, for `seconds` each time after a short warm-up:
        one after the other, or all at the same time when `at_once`. One host gives an empty list.
        """
        if len(self.hosts) == 1:
            return []
        pairs = list(zip(self.hosts, [*self.hosts[1:], self.hosts[0]]))

        def measure(pair: tuple[Host, Host]) -> LinkGoodput:
            sender, receiver = pair
            mbit_s = measure_goodput(
                sender.namespace, receiver.namespace, receiver.address, seconds
            )
            limits = [h.rate_mbit_s for h in pair if h.rate_mbit_s is not None]
            return LinkGoodput(sender.name, receiver.name, mbit_s, min(limits, default=None))

        with ThreadPoolExecutor(len(pairs) if at_once else 1) as pool:
            return list(pool.map(measure, pairs))

    def interface_counters(self, host: Host) -> tuple[int, int]:
        """(received, sent) bytes of the host's link so far, as the host sees them.

        Costs some 10 microseconds. See `InterfaceCounters` for what the bytes include. Raises
        ClusterError when the cluster is not there.
        """
        if host.name not in self._counters:
            raise ClusterError(f"the cluster {self.name} is not there: count while it is entered")
        return self._counters[host.name].read()

    def _batch(self, tool: str, namespace: str | None, commands: Iterable[str]) -> None:
        assert self._guard is not None, "only while entered"
        place = [] if namespace is None else ["-n", namespace]
        if tool == "ip" and self._network is _IPV6:
            place.insert(0, "-6")  # or rules are about IPv4
        text = "".join(command + "\n" for command in commands)
        run_tool(tool, *place, "-batch", "-", stdin=text, pass_fds=(self._guard.fileno(),))

    def _name_hosts(self) -> None:
        for host in self.hosts:
            try:
                host.write_names(["127.0.0.1 localhost", f"{host.address} {socket.gethostname()}"])
            except OSError as error:
                raise ClusterError(f"a host can't get an /etc/hosts of its own: {error}") from error

    def _switch_commands(self) -> list[str]:
        commands = []
        for host in self.hosts:
            port = f"port{host.index}"
            commands += [
                f"link add name {port} mtu {MTU_BYTES} type veth "
                f"peer name {host.interface} mtu {MTU_BYTES} netns {host.namespace}",
                self._address_command(self._switch_address, host.address, port),
                f"link set {port} up",
            ]
            if self._network is _IPV6:  # the second with the same address gets none by itself
                commands.append(f"route replace {host.address} dev {port}")
        return commands

    def _host_commands(self, host: Host) -> list[str]:
        return [
            "link set lo up",
            self._address_command(host.address, self._switch_address, host.interface),
            f"link set {host.interface} up",
            f"route add {self._network} via {self._switch_address} dev {host.interface} onlink",
        ]

    def _address_command(self, own: str, peer: str, device: str) -> str:
        # An IPv6 address is of no use until the kernel has looked for others that have it, too.
        certain = " nodad" if self._network is _IPV6 else ""
        return f"addr add {own} peer {peer} dev {device}{certain}"

    def _end_processes(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _END_TIMEOUT_S
            for process in [p for host in self.hosts for p in host.signal_processes(number)]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))


def missing_requirements() -> str | None:
    """A sentence that says why no cluster can be made here, or None when one was just made."""
    problem = _missing_tools()
    if problem is not None:
        return problem
    try:
        with Cluster(1, rate_mbit_s=100):
            return None
    except ClusterError as error:
        return f"this machine cannot make a throttled cluster: {error}"


def _missing_tools() -> str | None:
    if not sys.platform.startswith("linux"):
        return "a throttled cluster needs Linux: it is made of network namespaces"
    if os.geteuid() != 0:
        return "a throttled cluster needs root: run this with sudo"
    for tool in ("ip", "tc"):
        if tool_path(tool) is None:
            return f"a throttled cluster needs the command {tool!r}: install the package iproute2"
    return None


def _disable_ipv6() -> None:
    # Neighbour discovery would send packets over links that should be idle.
    for scope in ("all", "default"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")


def _enable_forwarding() -> None:
    for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            Path(f"/proc/sys/net/{setting}").write_text("1")
