"""One measured run: a system trains an emulated model on a throttled cluster."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Optional

from experiments.systems import SYSTEMS, System
from scripts.cluster import Cluster, Host

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).parent.parent
_END_S = 20.0


class RunFailed(RuntimeError):
    """A measured run did not come to its end; carries what its processes printed."""


@dataclass
class Run:
    """What was measured: times are of the slowest worker, iteration by iteration."""

    system: str
    model: str
    hosts: int
    rate_mbit_s: Optional[float]
    dilation: float
    compute_s: float
    """C: computation of one iteration, dilated, in seconds."""
    iteration_s: List[float]
    cpu_s: float
    """Processor time of all processes during the measured iterations."""
    worker_rss_kib: int
    spans: Dict[int, List[Dict[str, Any]]] = field(default_factory=dict)
    """By worker: what the emulated accelerator did, if asked for."""

    @property
    def median_s(self) -> float:
        """The median iteration."""
        return statistics.median(self.iteration_s)

    @property
    def efficiency(self) -> float:
        """C by the median iteration; 1 is as fast as without any communication."""
        return self.compute_s / self.median_s


def measure(
    cluster: Cluster,
    system: str,
    model: str,
    dilation: float = 1.0,
    warm_up: int = 2,
    iterations: int = 5,
    timeout_s: float = 300.0,
    spans: bool = False,
    during: Optional[ContextManager[object]] = None,
    **settings: object,
) -> Run:
    """Runs `system` on all hosts of `cluster`, each a worker and a server.

    `during` is entered when all workers have begun the measured iterations and left when the first
    has ended them, in threads of the measurement's own. p3kv's ranks are the hosts' numbers, so
    that its traces tell who shares a link. `settings` are environment variables for all processes.
    Raises RunFailed when a process fails or the run takes more than `timeout_s` seconds; nothing
    is left running either way.
    """
    texts = {name: str(value) for name, value in settings.items()}
    run = _Running(cluster, SYSTEMS[system], texts, during)
    command = [
        sys.executable, "-m", "experiments.emulated_worker", model, system,
        "--dilation", str(dilation), "--warm-up", str(warm_up), "--iterations", str(iterations),
        *(["--spans"] if spans else []),
    ]  # fmt: skip
    try:
        run.start(command)
        ends = run.wait(time.monotonic() + timeout_s)
    finally:
        run.end()
    by_rank = {end["rank"]: end for end in ends}
    return Run(
        system=system,
        model=model,
        hosts=len(cluster.hosts),
        rate_mbit_s=cluster.hosts[0].rate_mbit_s,
        dilation=dilation,
        compute_s=ends[0]["compute_s"],
        iteration_s=[max(times) for times in zip(*(end["iteration_s"] for end in ends))],
        cpu_s=run.cpu_s,
        worker_rss_kib=max(end["max_rss_kib"] for end in ends),
        spans={rank: end["spans"] for rank, end in by_rank.items()} if spans else {},
    )


class _Running:
    """The processes of one run, and what they say."""

    def __init__(
        self,
        cluster: Cluster,
        system: System,
        settings: Dict[str, str],
        during: Optional[ContextManager[object]],
    ) -> None:
        self.cpu_s = 0.0
        self._cluster = cluster
        self._system = system
        self._settings = settings
        self._during = during
        self._measured = contextlib.ExitStack()
        self._processes: List[subprocess.Popen] = []
        self._workers: List[subprocess.Popen] = []
        self._threads: List[threading.Thread] = []
        self._outputs: List[List[str]] = []
        self._changed = threading.Condition()
        self._begun: List[Dict[str, Any]] = []
        self._ended: List[Dict[str, Any]] = []
        self._cpu_begin_s = 0.0

    def start(self, worker_command: List[str]) -> None:
        """Starts a scheduler on the first host, and a server and a worker on each."""
        hosts = self._cluster.hosts
        port = _free_port()
        self._start(hosts[0], "scheduler", port, self._system.role_command)
        for host in hosts:
            self._start(host, "server", port, self._system.role_command)
        for host in hosts:
            self._workers.append(self._start(host, "worker", port, worker_command))

    def wait(self, deadline: float) -> List[Dict[str, Any]]:
        """Returns the workers' results when all are in."""
        count = len(self._workers)
        with self._changed:
            while len(self._ended) < count:
                left_s = deadline - time.monotonic()
                failed = [p for p in self._processes if p.poll() not in (None, 0)]
                if failed or left_s <= 0:
                    break
                self._changed.wait(min(left_s, 0.5))
        if len(self._ended) < count:
            for process in failed or self._processes:
                process.kill()
            self._join()
            said = "\n".join(line for lines in self._outputs for line in lines)
            raise RunFailed(f"{self._system.title} did not come to its end:\n{said}")
        end = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise RunFailed(f"{self._system.title}: a process did not end") from error
        self._join()
        return list(self._ended)

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        self._join()
        self._measured.close()

    def _start(self, host: Host, role: str, port: int, command: List[str]) -> subprocess.Popen:
        count = len(self._cluster.hosts)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": self._cluster.hosts[0].address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(count),
            "DMLC_NUM_SERVER": str(count),
            "DMLC_NODE_HOST": host.address,
            f"DMLC_{role.upper()}_ID": str(host.index),
            **self._system.environment,
            **self._settings,
        }
        process = host.popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=str(_ROOT),
        )
        self._processes.append(process)
        lines: List[str] = []
        self._outputs.append(lines)
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        self._threads.append(reader)
        return process

    def _read(self, process: subprocess.Popen, lines: List[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            try:
                facts = json.loads(line) if line.startswith('{"event"') else None
            except ValueError:
                facts = None
            if facts is None:
                lines.append(line)
                continue
            with self._changed:
                self._take(facts)
                self._changed.notify_all()

    def _take(self, facts: Dict[str, Any]) -> None:
        count = len(self._cluster.hosts)
        if facts["event"] == "begin":
            self._begun.append(facts)
            if len(self._begun) == count:
                self._cpu_begin_s = self._cpu_now_s()
                if self._during is not None:
                    self._measured.enter_context(self._during)
        else:
            if not self._ended:
                self.cpu_s = self._cpu_now_s() - self._cpu_begin_s
                self._measured.close()
            self._ended.append(facts)

    def _cpu_now_s(self) -> float:
        total = 0
        for process in self._processes:
            try:
                stat = Path(f"/proc/{process.pid}/stat").read_text()
            except OSError:
                continue
            fields = stat.rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / _CLOCK_TICKS

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=5.0)


def _free_port() -> int:
    """A port for the scheduler: free here, and the hosts' namespaces are new and empty."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
