"""`p3kv launch -H`: real ssh, to real sshds in the network namespaces of a cluster."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple

import psutil
import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.errors import ConfigError
from p3kv.forwarding import forwarded
from p3kv.launcher import Graces, Host, Launcher, Part, parse_hosts
from p3kv.launcher.hosts import in_turn
from p3kv.launcher.remote import on_hosts
from tests import sshd
from tests.jobs import ROOT, SCRIPTS, environment, eventually

DEADLINE_S = 60.0
_PROBLEM = missing_requirements() or sshd.missing()
needs_ssh = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


class Network(NamedTuple):
    cluster: Cluster
    path: str
    """A PATH with the ssh that reaches all hosts."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with tempfile.TemporaryDirectory() as folder, Cluster(2) as cluster, sshd.ssh_between(
        cluster, Path(folder)
    ) as path:
        yield Network(cluster, path)


class Job:
    """`hold.py` with a worker on the first host and two on the second, launched on the first."""

    def __init__(self, network: Network, folder: Path, *arguments: str, hosts: str = "") -> None:
        first, second = network.cluster.hosts
        self.folder = folder
        command = [
            sys.executable, "-m", "p3kv", "launch", "-H",
            hosts or f"{first.address},{second.address}:2", "-s", "2", "--",
            "python", str(SCRIPTS / "hold.py"), str(folder), *arguments,
        ]  # fmt: skip
        bin_folder = str(Path(sys.executable).parent)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  closed by result
        self.launcher = first.popen(
            command,
            env=environment(
                PATH=f"{bin_folder}:{network.path}", DMLC_TEST_MARK=folder, MXNET_TEST="of MXNet's",
                P3KV_WARN_AFTER_S=7, OMP_NUM_THREADS=3, DMLC_NODE_HOST="192.0.2.1", MINE="private",
            ),
            cwd=ROOT / "tests",
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def joined(self) -> List[Dict[str, Any]]:
        """What the workers say of themselves, when all have joined."""
        files = [self.folder / f"worker-{rank}" for rank in range(3)]

        def all_there() -> bool:
            assert self.launcher.poll() is None, self.said()
            return all(file.exists() for file in files)

        eventually(all_there, DEADLINE_S)
        return [json.loads(file.read_text()) for file in files]

    def said(self) -> str:
        return os.pread(self.output.fileno(), 1 << 24, 0).decode()

    def end(self) -> str:
        """Waits for the launcher, and returns what all have printed."""
        try:
            self.launcher.wait(DEADLINE_S)
        finally:
            said = self.said()
            self.output.close()
        return said

    def left(self) -> List[str]:
        """The job's processes on all hosts that run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                mark = process.environ().get("DMLC_TEST_MARK")
                if mark == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found


@needs_ssh
def test_settings_and_the_secret_reach_the_hosts_but_no_command_line(
    network: Network, tmp_path: Path
) -> None:
    job = Job(network, tmp_path)
    told = job.joined()
    secrets = {one["env"]["P3KV_SECRET"] for one in told}
    assert len(secrets) == 1
    shown = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            shown.append(" ".join(process.cmdline()))
    assert sum("hold.py" in line for line in shown) >= 4
    assert not any(secrets.copy().pop() in line for line in shown)
    (tmp_path / "stop").touch()
    said = job.end()
    assert job.launcher.returncode == 0, said
    for rank, one in enumerate(told):
        assert f"worker {rank}  | worker {rank} of 3 has joined" in said
        env = one["env"]
        assert (env["MXNET_TEST"], env["P3KV_WARN_AFTER_S"]) == ("of MXNet's", "7")
        assert (env["OMP_NUM_THREADS"], one["cwd"]) == ("3", str(ROOT / "tests"))
        assert "MINE" not in env and "DMLC_NODE_HOST" not in env
        assert "SSH_CONNECTION" in env, "its own host's variables are there as well"
    networks = [one["network"] for one in told]
    assert networks[0] != networks[1] == networks[2] != os.readlink("/proc/self/ns/net")
    eventually(lambda: not job.left())


@needs_ssh
def test_the_exit_code_is_the_failed_script_s_and_everybody_knows_why(
    network: Network, tmp_path: Path
) -> None:
    job = Job(network, tmp_path, "2=7")
    said = job.end()
    assert job.launcher.returncode == 7, said
    last = said.splitlines()[-1]
    assert last == "p3kv launch: worker 2 failed first: its script ended with exit code 7"
    assert "worker 0" in said
    eventually(lambda: not job.left())


@needs_ssh
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_a_host_when_the_launcher_ends(
    network: Network, tmp_path: Path, signum: signal.Signals
) -> None:
    job = Job(network, tmp_path)
    job.joined()
    assert len(job.left()) >= 6
    start = time.monotonic()
    job.launcher.send_signal(signum)
    said = job.end()
    expected = -signum if signum == signal.SIGKILL else 128 + signum
    assert job.launcher.returncode == expected, said
    eventually(lambda: not job.left())
    assert time.monotonic() - start < 15


@needs_ssh
def test_a_host_that_lets_nobody_in_is_named(network: Network, tmp_path: Path) -> None:
    first, second = network.cluster.hosts
    hosts = f"{first.address},nobody@{second.address}:2"
    job = Job(network, tmp_path, hosts=hosts)
    said = job.end()
    assert job.launcher.returncode == 255, said
    assert "Permission denied" in said
    last = said.splitlines()[-1]
    assert last.startswith(f"p3kv launch: cannot start server 1 on nobody@{second.address}: ")
    assert "without a password" in last
    eventually(lambda: not job.left())


@needs_ssh
def test_more_processes_start_on_a_host_than_sshd_lets_in_at_once(network: Network) -> None:
    env = {"PATH": network.path}
    parts = [
        Part("scheduler", ("true",), {}, serves_workers=True),
        *(Part(f"worker {i}", ("sh", "-c", f"echo {i}; kill -9 $$"), {}) for i in range(25)),
    ]
    host = Host(network.cluster.hosts[0].address, 25)
    out, err = io.BytesIO(), io.BytesIO()
    there = on_hosts(parts, [host], own_env=env, cwd="/", term_s=1, silence_s=60)
    # From here no host is reached: ssh has to start in a namespace.
    ip = ("ip", "netns", "exec", network.cluster.hosts[1].namespace)
    there = [replace(part, argv=(*ip, *part.argv)) for part in there]
    code = Launcher(there, out=out, err=err, graces=Graces(others_s=20)).run()
    assert code == 137, err.getvalue()
    assert sorted(int(line.split(b"|")[1]) for line in out.getvalue().splitlines()) == [*range(25)]
    assert f"killed by SIGKILL on {host.name}".encode() in err.getvalue()


def test_hosts_have_one_worker_or_as_many_as_a_colon_says() -> None:
    assert parse_hosts("a") == [Host("a", 1)]
    assert parse_hosts("me@10.0.0.1:2, node-7.x") == [Host("me@10.0.0.1", 2), Host("node-7.x", 1)]
    for wrong in ("", "a,", "a:0", "a:x", "-oProxyCommand=x", "a b", "::1", "a:1:2"):
        with pytest.raises(ConfigError, match="host1,host2:2"):
            parse_hosts(wrong)
    with pytest.raises(ConfigError, match="write a:2"):
        parse_hosts("a,a")


def test_servers_are_spread_as_workers_are() -> None:
    hosts = [Host("a", 1), Host("b", 3)]
    for count, names in {1: "a", 2: "ab", 3: "abb", 4: "abbb", 6: "abbbab"}.items():
        assert "".join(host.name for host in in_turn(hosts, count)) == names


def test_what_travels_to_other_hosts_is_settings_and_paths() -> None:
    goes = {"P3KV_X": "1", "PS_VERBOSE": "1", "MXNET_X": "", "PATH": "/bin", "PYTHONPATH": "x"}
    stays = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "DMLC_NODE_HOST": "x", "XP3KV_": "x"}
    assert forwarded({**goes, **stays}) == goes
