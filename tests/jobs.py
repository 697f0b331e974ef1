"""Whole jobs for tests: real processes, real sockets, real MXNet, and a deadline on everything."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import psutil

from experiments.cluster import Cluster
from p3kv.common.addresses import family_of

SCRIPTS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parent.parent
PLUGINS = Path(__file__).parent / "plugins"
LEAN = Path(__file__).parent / "lean"
JOIN = [sys.executable, str(SCRIPTS / "join.py")]
"""A process that joins a job in whatever role, and leaves it again."""
PROMISED_S = 10.0
"""Within this time all processes learn what is wrong, where cores are free: other work may take
them any length of time. So only tests that run alone look at it."""
DEADLINE_S = 60.0
"""How long tests wait for what comes within `PROMISED_S` on free cores. What p3kv only learns by
its timeouts for silence (120 s) and for the rendezvous (300 s) comes later."""
JOB_S = 240.0
"""How long tests wait for the end of a job that makes many checks."""
SUMS_ONLY = {"MXNET_UPDATE_ON_KVSTORE": 0}
"""For jobs that need no optimizer on their servers. By default each server imports MXNet when the
job has assembled, which takes a second or two, and workers wait for that."""
SECRET = "what only the processes of tests know"


class JobResult:
    """How a job ended: exit code, everything it printed, and how long it took."""

    def __init__(self, code: int, output: str, seconds: float) -> None:
        self.code = code
        self.output = output
        self.seconds = seconds

    def said_by(self, name: str) -> str:
        """What one part of a job printed, such as 'worker 0', where a launcher marked the lines,
        and what the launcher says that it has said as another one."""
        marked = [line.partition("|") for line in self.output.splitlines()]
        said = [text for who, _, text in marked if who.strip() == name]
        for others, first in re.findall("p3kv launch: (.*) said the same as (.*)", self.output):
            if name in others.split(", "):
                of_first = [text for who, _, text in marked if who.strip() == first]
                said += [text for text in of_first if text.startswith(" p3kv ")]
        return "\n".join(said)


def environment(**changes: object) -> Dict[str, str]:
    """This process's environment with changes, one thread of computation for each process, and the
    secret that jobs of tests have. Modules in `tests/plugins` can be imported, and imports of MXNet
    are lean (`tests/lean`).
    """
    values = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "P3KV_SECRET": SECRET,
    }  # fmt: skip
    if sys.version_info < (3, 12):  # which has none
        values["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"  # for MXNet: the other is slow to import
    values.pop("PYTHONUNBUFFERED", None)  # which parts lines from their ends, in a pipe of ranks
    values.update({name: str(value) for name, value in changes.items()})
    values["PYTHONPATH"] += f"{os.pathsep}{PLUGINS}{os.pathsep}{LEAN}"
    return values


def run_job(
    script: str,
    arguments: Sequence[object] = (),
    workers: int = 1,
    servers: int = 1,
    timeout_s: float = JOB_S,
    **settings: object,
) -> JobResult:
    """Runs `tests/workers/<script>` as a job through `p3kv launch`."""
    command = launch_command(script, arguments, workers, servers)
    return run(command, environment(**settings), timeout_s)


def launch_command(
    script: str, arguments: Sequence[object], workers: int, servers: int, root_port: int = 0
) -> List[str]:
    """`p3kv launch` of a script in `tests/workers`."""
    return [
        sys.executable, "-m", "p3kv", "launch", "-n", str(workers), "-s", str(servers),
        "--root-port", str(root_port), "--",
        sys.executable, str(SCRIPTS / script), *map(str, arguments),
    ]  # fmt: skip


def run(command: List[str], env: Dict[str, str], timeout_s: float) -> JobResult:
    """Runs a command to its end; fails, with everything it printed, when it takes too long."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        end(process)
        output = process.communicate()[0].decode(errors="replace")
        raise AssertionError(f"no end after {timeout_s} s: {command}\n{output}") from None
    return JobResult(process.returncode, output, time.monotonic() - start)


def end(process: subprocess.Popen, patience_s: float = 10.0) -> None:
    """Ends a process that a test has started, and what it started in its session."""
    for wish in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, wish)
        except ProcessLookupError:
            return
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        return


def start_on(
    cluster: Cluster,
    script: str,
    arguments: Sequence[object] = (),
    servers: Optional[int] = None,
    **settings: object,
) -> List[Tuple[str, subprocess.Popen]]:
    """Starts a job with a worker and a server on each of the cluster's hosts; their roles, too.

    The first host has the scheduler as well. With `servers`, only so many hosts have one.
    """
    serve = [sys.executable, "-c", "import p3kv"]
    work = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    hosts = cluster.hosts
    started = []
    serving = hosts[:servers]
    for host in hosts:
        roles = ["server"] * (host in serving) + ["worker"] + ["scheduler"] * (host is hosts[0])
        for role in roles:
            env = environment(
                DMLC_ROLE=role, DMLC_PS_ROOT_URI=hosts[0].address, DMLC_PS_ROOT_PORT=9000,
                DMLC_NUM_WORKER=len(hosts), DMLC_NUM_SERVER=len(serving),
                DMLC_NODE_HOST=host.address, **settings,
            )  # fmt: skip
            process = host.popen(
                work if role == "worker" else serve,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append((role, process))
    return started


def start_role(
    role: str, command: Sequence[str], port: int, workers: int = 1, servers: int = 1,
    root: str = "127.0.0.1", **changes: object,
) -> subprocess.Popen:  # fmt: skip
    """Starts one process of a job as any launcher would, with the DMLC_* variables only."""
    place = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": workers,
        "DMLC_NUM_SERVER": servers,
    }
    env = environment(**{**place, **changes})
    return subprocess.Popen(
        list(command),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )


def output_of(process: subprocess.Popen, timeout_s: float) -> Optional[str]:
    """What a process printed, once it has ended by itself; None if it does not in time."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        return None


def results(
    processes: Mapping[str, subprocess.Popen], since: float, timeout_s: float
) -> Dict[str, JobResult]:
    """How several processes ended, each with its seconds since `since` on the monotonic clock.

    Fails, with everything that they printed, when one takes too long; none is left then.
    """
    deadline = time.monotonic() + timeout_s

    def result(process: subprocess.Popen) -> Optional[JobResult]:
        output = output_of(process, max(0.0, deadline - time.monotonic()))
        seconds = time.monotonic() - since
        return None if output is None else JobResult(process.returncode, output, seconds)

    with ThreadPoolExecutor(len(processes)) as pool:
        ended = dict(zip(processes, pool.map(result, processes.values())))
    late = {name: process for name, process in processes.items() if ended[name] is None}
    for process in late.values():
        end(process)
    said = {
        name: process.communicate()[0] if name in late else getattr(ended[name], "output", "")
        for name, process in processes.items()
    }
    assert not late, f"no end of {', '.join(late)} after {timeout_s} s: {said}"
    return {name: one for name, one in ended.items() if one is not None}


def joined(*plan: Tuple[str, Dict[str, str]]) -> Dict[str, JobResult]:
    """How the processes of a job that joins and ends have ended, each with settings of its own."""
    count = {role: sum(name.startswith(role) for name, _ in plan) for role in ("worker", "server")}
    with held_port() as holder:
        port, since = holder.getsockname()[1], time.monotonic()
        started = {"scheduler": start_role("scheduler", JOIN, port, *count.values())}
        for name, changes in plan:
            role, _, rank = name.partition(" ")
            place = {f"DMLC_{role.upper()}_ID": rank, **SUMS_ONLY}
            started[name] = start_role(role, JOIN, port, *count.values(), **place, **changes)
        return results(started, since, DEADLINE_S)


def run_with_gloo(command: List[str], env: Dict[str, str], timeout_s: float) -> JobResult:
    """As `run`, up to three times: where torch's process group is over gloo, torch 2.13 ends one
    process in ten by SIGABRT as Python ends, also in scripts without p3kv."""
    for _ in range(3):
        result = run(command, env, timeout_s)
        if "terminate called without an active exception" not in result.output:
            break
    return result


def held_port(address: str = "127.0.0.1") -> closing[socket.socket]:
    """A port of an address that nobody gets by chance while the socket is open.

    It is bound and does not listen: connections are refused until somebody who asks for exactly
    this port listens there.
    """
    holder = socket.socket(family_of(address))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return closing(holder)


def eventually(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Returns when `condition()` is true; fails when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def connections_of(pid: int, status: str) -> List[tuple]:
    """(own port, peer's port or None) of a process's TCP connections in a state, e.g. LISTEN."""
    return [
        (connection.laddr[1], connection.raddr[1] if connection.raddr else None)
        for connection in psutil.net_connections("tcp")
        if connection.pid == pid and connection.status == status
    ]


class TrainingJob:
    """`steady.py`, or a script that is like it, under `p3kv launch`: a job that trains until
    `stop`, or until it fails.

    Everything that it starts inherits the variable TEST_JOB_MARK with a value of its own.
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        servers: int = 1,
        arguments: Sequence[object] = (),
        root_port: int = 0,
        cwd: Optional[Path] = None,
        script: str = "steady.py",
        **changes: object,
    ) -> None:
        self.mark = str(folder)
        self._folder = folder
        self._num_workers = workers
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._started_at = time.monotonic()
        self.launcher = subprocess.Popen(
            launch_command(script, [folder, *arguments], workers, servers, root_port),
            env=environment(TEST_JOB_MARK=self.mark, **changes),
            cwd=cwd,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        end(self.launcher)
        self._output.close()

    def parts(self) -> Dict[str, psutil.Process]:
        """The job's processes by their names, such as 'worker 0' and 'scheduler'."""
        found = {}
        for child in psutil.Process(self.launcher.pid).children():
            with suppress(psutil.NoSuchProcess):
                env = child.environ()
                role = env.get("DMLC_ROLE")
                if role is not None:
                    rank = env.get(f"DMLC_{role.upper()}_ID")
                    found[role if rank is None else f"{role} {rank}"] = child
        return found

    def wait_until_training(self) -> None:
        """Returns when every worker is in mid-training; fails when the job ends before."""

        def trains() -> bool:
            assert self.launcher.poll() is None, self.output()
            return len(list(self._folder.glob("trains-*"))) == self._num_workers

        eventually(trains)

    def stop(self) -> None:
        """Has the training end well, after the step that is under way."""
        (self._folder / "stop").touch()

    def output(self) -> str:
        """What the job has printed so far."""
        # Reading must not move the position at which the job writes.
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def result(self, timeout_s: float) -> JobResult:
        """How the job ended; fails when it takes longer."""
        try:
            self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s} s:\n{self.output()}") from None
        seconds = time.monotonic() - self._started_at
        return JobResult(self.launcher.returncode, self.output(), seconds)
