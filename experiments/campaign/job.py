"""A job on a throttled cluster: the processes of one system, what they say and what they use."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Mapping, NamedTuple, Optional, Sequence

from experiments.campaign.processes import Process, all_reducing, process_group, with_servers
from experiments.cluster import Cluster, Host
from experiments.cluster.netns import in_namespace
from experiments.emulation.systems import System

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).parent.parent.parent
_END_S = 20.0


class RunFailed(RuntimeError):
    """A job did not come to its end; carries what its processes printed."""


class Finished(NamedTuple):
    """What a job's workers told at their end, and what all its processes used."""

    ends: List[Dict[str, Any]]
    cpu_s: float
    """Processor time of all processes while the workers measured."""
    server_rss_kib: int
    """The most memory that a server has held; 0 without servers."""


def run_job(
    cluster: Cluster,
    system: System,
    worker: Sequence[str],
    timeout_s: float,
    settings: Mapping[str, object],
    during: Optional[ContextManager[object]] = None,
    workers: Optional[int] = None,
    per_host: int = 1,
) -> Finished:
    """Runs `system` on all hosts of `cluster`, each a worker that runs a module, and a server if
    the system has servers.

    With `workers`, only so many of the first hosts have a worker; with `per_host`, each of them has
    so many.

    `worker` is the module and its arguments. Each worker prints a line of JSON with the event
    "begin" when what is measured begins, and one with the event "end", and its results, when that
    ends. `during` is entered when all have begun and left when the first has ended, in threads of
    this function's own. p3kv's ranks are the hosts' numbers, so that its traces tell who shares a
    link. `settings` are environment variables for all processes. Raises RunFailed when a process
    fails or the job takes more than `timeout_s` seconds; nothing is left running either way.
    """
    as_text = {name: str(value) for name, value in settings.items()}
    hosts = cluster.hosts[: workers or len(cluster.hosts)]
    working = [host for host in hosts for _ in range(per_host)]
    job = _Job(cluster, system, as_text, during, working)
    try:
        job.start([system.python, "-m", *worker])
        ends = job.wait(time.monotonic() + timeout_s)
    finally:
        job.end()
    return Finished(ends, job.cpu_s, job.server_rss_kib)


class _Job:
    """The processes, and what they say."""

    def __init__(
        self,
        cluster: Cluster,
        system: System,
        settings: Dict[str, str],
        during: Optional[ContextManager[object]],
        working: Sequence[Host],
    ) -> None:
        """`working`: each worker's host."""
        self.cpu_s = 0.0
        self.server_rss_kib = 0
        self._cluster = cluster
        self._system = system
        self._settings = settings
        self._during = during
        self._working = working
        self._num_workers = len(working)
        self._measured = contextlib.ExitStack()
        self._processes: List[subprocess.Popen] = []
        self._servers: List[subprocess.Popen] = []
        self._rendezvous: Optional[subprocess.Popen] = None
        self._threads: List[threading.Thread] = []
        self._outputs: List[List[str]] = []
        self._changed = threading.Condition()
        self._begun: List[Dict[str, Any]] = []
        self._ended: List[Dict[str, Any]] = []
        self._cpu_begin_s = 0.0

    def start(self, worker_command: List[str]) -> None:
        """Starts the workers, and what the system has beside them."""
        hosts = self._cluster.hosts
        if not self._system.all_reduce:
            for process in with_servers(hosts, self._system, self._working, worker_command):
                self._start(process, subprocess.DEVNULL)
            return
        if self._system.in_torch:
            for process in process_group(self._working, worker_command):
                self._start(process, subprocess.DEVNULL)
            return
        with in_namespace(
            hosts[0].namespace,
            lambda: socket.create_server((hosts[0].address, 0), backlog=len(hosts)),
        ) as listener:
            port = listener.getsockname()[1]
            for process in all_reducing(self._working, self._system, worker_command, port):
                at_rendezvous = process.role == "rendezvous"
                self._start(process, listener if at_rendezvous else subprocess.DEVNULL)

    def wait(self, deadline: float) -> List[Dict[str, Any]]:
        """Returns the workers' results when all are in."""
        with self._changed:
            while len(self._ended) < self._num_workers:
                left_s = deadline - time.monotonic()
                failed = [p for p in self._processes if p.poll() not in (None, 0)]
                if failed or left_s <= 0:
                    break
                self._changed.wait(min(left_s, 0.5))
        if len(self._ended) < self._num_workers:
            for process in failed or self._processes:
                process.kill()
            self._join()
            said = "\n".join(line for lines in self._outputs for line in lines)
            raise RunFailed(f"{self._system.title} did not come to its end:\n{said}")
        # What the last iteration has pushed is still on its way: for many seconds on a slow link.
        end = max(deadline, time.monotonic() + _END_S)
        for process in self._processes:
            if process is self._rendezvous:
                continue  # which serves until it is killed
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise RunFailed(f"{self._system.title}: a process did not end") from error
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

    def _start(self, planned: Process, stdin: Any) -> None:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
            **planned.environment,
            **self._system.environment,
            **self._settings,
        }
        process = planned.host.popen(
            planned.command,
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=str(_ROOT),
        )
        self._processes.append(process)
        if planned.role == "server":
            self._servers.append(process)
        elif planned.role == "rendezvous":
            self._rendezvous = process
        lines: List[str] = []
        self._outputs.append(lines)
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        self._threads.append(reader)

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
        if facts["event"] == "begin":
            self._begun.append(facts)
            if len(self._begun) == self._num_workers:
                self._cpu_begin_s = self._cpu_now_s()
                if self._during is not None:
                    self._measured.enter_context(self._during)
        else:
            if not self._ended:
                self.cpu_s = self._cpu_now_s() - self._cpu_begin_s
                self.server_rss_kib = max(map(_peak_rss_kib, self._servers), default=0)
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


def _peak_rss_kib(process: subprocess.Popen) -> int:
    """The most memory that the process has held; 0 when it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) if peaks else 0
