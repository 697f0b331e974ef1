"""Limits on a link: the token bucket that every limit here uses, and one for a real interface."""

from __future__ import annotations

import os
import re
import socket
from types import TracebackType
from typing import NamedTuple

from experiments.cluster.netns import CleanupGuard, ClusterError, in_namespace, run_tool

MIN_RATE_MBIT_S = 0.1
BURST_S, MIN_BURST_BYTES, MAX_BURST_BYTES = 0.005, 16 << 10, 128 << 10
PACKET_S, MIN_PACKET_BYTES, MAX_PACKET_BYTES = 0.00125, 4 << 10, 64 << 10
QUEUE_S, MIN_QUEUE_BYTES = 0.05, 64 << 10

# Tells the limit of `DeviceLimit` from anybody else's.
_OWN_HANDLE = "7033:"

_RESTORE = f"""
tc qdisc show dev "$1" 2>/dev/null | grep -q '^qdisc tbf {_OWN_HANDLE} .*root' || exit 0
device=$1
shift
tc qdisc "$1" dev "$device" root $2
"""


class Bucket(NamedTuple):
    """A token bucket in the terms of `tc tbf`."""

    rate_bit_s: int
    burst_bytes: int
    queue_bytes: int
    packet_bytes: int

    def __str__(self) -> str:
        return f"tbf rate {self.rate_bit_s}bit burst {self.burst_bytes} limit {self.queue_bytes}"


def bucket(rate_mbit_s: float) -> Bucket:
    """The token bucket of a link that carries `rate_mbit_s` of Ethernet frames (no preamble, CRC).

    The burst is 5 ms of the line and at most 128 KiB. After a pause a short flow is early by that
    much; with less, a busy machine, whose timers come late by a turn of its scheduler, would not
    reach the rate. The queue holds 50 ms. `packet_bytes` is the largest packet (GSO) that a sender
    should make: a bucket cuts one larger than its burst in software, at ten times the processor
    time, and one nearly as large as its burst leaves late timers no reserve. Raises ClusterError
    for less than 0.1 Mbit/s.
    """
    if not MIN_RATE_MBIT_S <= rate_mbit_s < float("inf"):
        raise ClusterError(
            f"a rate of {rate_mbit_s} Mbit/s: give at least {MIN_RATE_MBIT_S}, or no limit"
        )
    bytes_s = rate_mbit_s * 1e6 / 8
    burst_bytes = min(max(int(bytes_s * BURST_S), MIN_BURST_BYTES), MAX_BURST_BYTES)
    return Bucket(
        rate_bit_s=int(rate_mbit_s * 1e6),
        burst_bytes=burst_bytes,
        queue_bytes=max(int(bytes_s * QUEUE_S), MIN_QUEUE_BYTES) + burst_bytes,
        packet_bytes=min(max(int(bytes_s * PACKET_S), MIN_PACKET_BYTES), MAX_PACKET_BYTES),
    )


def losing(share: float) -> str:
    """What `tc filter add ... bpf direct-action` needs to drop a share of the packets.

    A program for the kernel's packet filter: load a random number of 32 bits, compare it, let the
    packet go on (0) or drop it (2).
    """
    kept = int((1 - share) * 0xFFFFFFFF)
    return f"bytecode '4,32 0 0 4294963256,37 0 1 {kept},6 0 0 2,6 0 0 0'"


class DeviceLimit:
    """Limits what the interface `device` of this machine sends to `rate_mbit_s`, while entered.

    For experiments on real machines; run it on each, because what a machine receives is limited
    only by what the others send. On leaving, and also when this process is killed, the interface
    gets back the root qdisc it had. Entering raises ClusterError, with the interface untouched,
    when it does not exist or `tc` cannot rebuild its root qdisc from what it shows of it.
    """

    def __init__(self, device: str, rate_mbit_s: float) -> None:
        self._device = device
        # The sender's packets stay as large as they are here, and must fit into the burst.
        self._bucket = bucket(rate_mbit_s)._replace(burst_bytes=MAX_BURST_BYTES)
        self._before = ""
        self._guard: CleanupGuard | None = None

    def __enter__(self) -> DeviceLimit:
        if os.geteuid() != 0:
            raise ClusterError("limiting an interface needs root: run this with sudo")
        interfaces = [name for _, name in socket.if_nameindex()]
        if self._device not in interfaces:
            raise ClusterError(f"no interface {self._device!r}: there are {', '.join(interfaces)}")
        self._before = _shown_qdiscs(self._device)
        rebuild = _rebuilding_arguments(self._device, self._before)
        self._guard = CleanupGuard(
            _RESTORE, self._device, *(("replace", rebuild) if rebuild else ("del", ""))
        )
        try:
            change = f"qdisc replace dev {self._device} root handle {_OWN_HANDLE} {self._bucket}"
            run_tool("tc", *change.split(), pass_fds=(self._guard.fileno(),))
        except BaseException:
            self._guard.release()
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
        """Put the root qdisc back; may be called twice. Raises ClusterError when it differs."""
        if self._guard is None:
            return
        self._guard.release()
        self._guard = None
        now = _shown_qdiscs(self._device)
        if now != self._before:
            raise ClusterError(
                f"{self._device} had the qdisc '{self._before}' and now has '{now}'; "
                f"set it with 'tc qdisc replace dev {self._device} root ...'"
            )


def _shown_qdiscs(device: str) -> str:
    """What sends on `device`, as `tc` shows it, less what changes by itself."""
    lines = run_tool("tc", "qdisc", "show", "dev", device).splitlines()
    sending = [line for line in lines if not re.match(r"qdisc (ingress|clsact) ", line)]
    text = "; ".join(" ".join(line.split()) for line in sending)
    return re.sub(r" dev \S+| refcnt \d+", "", text)


def _rebuilding_arguments(device: str, shown: str) -> str:
    """What `tc qdisc replace dev ... root` needs to make `shown`; "" for the kernel's own."""
    root = re.match(r"qdisc (\S+) (\w+:) root ?(.*)", shown)
    if root is None:
        raise ClusterError(f"{device} has no root qdisc that tc shows (it shows '{shown}')")
    kind, handle, options = root.groups()
    # The kernel gives its own qdiscs, one for each queue of the device, the handle 0.
    if set(re.findall(r"qdisc \S+ (\w+:)", shown)) == {"0:"}:
        return ""
    remedy = f"remove it first with 'tc qdisc del dev {device} root'"
    if handle == _OWN_HANDLE:
        raise ClusterError(f"{device} is already limited by another run: end that, or {remedy}")
    # tc shows packets as `100p` and reads `100`.
    rebuild = f"handle {handle} {kind} " + re.sub(r"\b(\d+)p\b", r"\1", options)

    def rehearse() -> str:
        run_tool("tc", *f"qdisc replace dev lo root {rebuild}".split())
        return _shown_qdiscs("lo")

    try:
        rebuilt = in_namespace(None, rehearse)
    except ClusterError as error:
        rebuilt = str(error)
    if rebuilt != shown or run_tool("tc", "filter", "show", "dev", device).strip():
        raise ClusterError(
            f"{device} has the qdisc '{shown}', which could not be put back as it was "
            f"(an attempt elsewhere gave '{rebuilt}'): {remedy}"
        )
    return rebuild
