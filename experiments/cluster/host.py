"""One host of a throttled cluster: a place for processes, and one end of a link."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any, Mapping, Sequence

from experiments.cluster.netns import tool_path
from experiments.cluster.throttle import Bucket

# `ip netns exec` mounts what a namespace has there over the files of /etc.
_FILES = Path("/etc/netns")


class Host:
    """One host of a `Cluster`: a namespace with one address and one interface besides loopback."""

    def __init__(self, index: int, namespace: str, interface: str, address: str) -> None:
        self.index = index
        self.name = f"host{index}"
        self.namespace = namespace
        self.interface = interface
        self.address = address
        self.rate_mbit_s: float | None = None
        self._processes: list[tuple[subprocess.Popen[Any], bool]] = []
        self._burst_bytes = 0
        self._handle = 0

    def write_names(self, lines: Sequence[str]) -> None:
        """Makes `lines` the /etc/hosts that processes of the host see from their start on."""
        folder = _FILES / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("".join(line + "\n" for line in lines))

    def popen(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = True,
        **popen_kwargs: Any,
    ) -> subprocess.Popen[Any]:
        """Start `argv` inside the host; takes what `subprocess.Popen` takes.

        The returned process is `argv` itself (same pid), so signals reach it. A command that does
        not exist ends with status 255 and a message. What still runs when the cluster is removed
        gets SIGTERM, and SIGKILL 3 s later; with `start_new_session` that goes to its whole
        process group.
        """
        ip = tool_path("ip")
        assert ip is not None, "a cluster exists, so ip does"
        process = subprocess.Popen(
            [ip, "netns", "exec", self.namespace, *argv],
            env=env,
            start_new_session=start_new_session,
            **popen_kwargs,
        )
        self._processes.append((process, start_new_session))
        return process

    def limit_command(self, limit: Bucket | None) -> str:
        """What `tc` is told for both ends of the link, with a place for the device."""
        burst_bytes = 0 if limit is None else limit.burst_bytes
        if burst_bytes < self._burst_bytes:
            # A new handle makes a new queue. In the old one, a packet larger than the new burst
            # would wait for ever and hold up all behind it.
            self._handle += 1
        self._burst_bytes = burst_bytes
        if limit is None:
            return "qdisc del dev {} root"
        return f"qdisc replace dev {{}} root handle {self._handle % 0x7000 + 1:x}: {limit}"

    def signal_processes(self, number: int) -> list[subprocess.Popen[Any]]:
        """Sends a signal to the processes that still run, and returns them."""
        running = [(p, is_leader) for p, is_leader in self._processes if p.poll() is None]
        for process, is_leader in running:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if is_leader else os.kill)(process.pid, number)
        return [process for process, _ in running]
