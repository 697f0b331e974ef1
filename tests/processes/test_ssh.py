"""`p3kv launch -H`: real ssh, to real sshds in the network namespaces of a cluster."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.config.variables import forwarded
from p3kv.errors import ConfigError
from p3kv.processes.launcher import Graces, Host, JobPart, Launcher, parse_hosts
from p3kv.processes.launcher.guardian import GREETING, guardian_command
from p3kv.processes.launcher.parts import in_turn, on_hosts
from tests import sshd
from tests.jobs import DEADLINE_S, ROOT
from tests.on_cluster import HOLD, ClusterJob, command_lines, needs

needs_ssh = needs(missing_requirements(), sshd.missing())


class SshJob(ClusterJob):
    """`hold.py` with a worker on the first host and two on the second, launched on the first."""

    def __init__(
        self, cluster: Cluster, path: str, folder: Path, *arguments: str, hosts: str = "n0,n1:2"
    ) -> None:
        super().__init__(
            cluster,
            folder,
            [
                sys.executable, "-m", "p3kv", "launch", "-H", hosts, "-s", "2", "--",
                "python", *HOLD[1:], str(folder), *arguments,
            ],
            workers=3,
            cwd=ROOT / "tests",
            PATH=f"{Path(sys.executable).parent}:{path}",
            MXNET_TEST="of MXNet's",
            P3KV_WARN_AFTER_S=7,
            OMP_NUM_THREADS=3,
            DMLC_NODE_HOST="192.0.2.1",
            MINE="private",
        )  # fmt: skip

    def joined(self) -> List[Dict[str, Any]]:
        """What the workers say of themselves, when all have joined."""
        return [json.loads(file.read_text()) for file in self.wait_until_joined()]


@needs_ssh
def test_settings_and_the_secret_reach_the_hosts_but_no_command_line(
    cluster: Cluster, ssh_path: str, tmp_path: Path
) -> None:
    job = SshJob(cluster, ssh_path, tmp_path)
    told = job.joined()
    (secret,) = {one["env"]["P3KV_SECRET"] for one in told}
    shown = command_lines()
    assert sum("hold.py" in line for line in shown) >= 4
    assert not any(secret in line for line in shown)
    job.stop()
    result = job.result()
    assert result.code == 0, result.output
    for rank, one in enumerate(told):
        assert f"worker {rank} of 3 has joined" in result.said_by(f"worker {rank}")
        env = one["env"]
        assert (env["MXNET_TEST"], env["P3KV_WARN_AFTER_S"]) == ("of MXNet's", "7")
        assert (env["OMP_NUM_THREADS"], one["cwd"]) == ("3", str(ROOT / "tests"))
        assert "MINE" not in env and "DMLC_NODE_HOST" not in env
        assert "SSH_CONNECTION" in env, "its own host's variables are there as well"
    places = [(one["env"]["LOCAL_RANK"], one["env"]["LOCAL_WORLD_SIZE"]) for one in told]
    assert places == [("0", "1"), ("0", "2"), ("1", "2")]
    assert [one["on_this_host"] for one in told] == [[0], [1, 2], [1, 2]]
    networks = [one["network"] for one in told]
    assert networks[0] != networks[1] == networks[2] != os.readlink("/proc/self/ns/net")


@needs_ssh
def test_the_exit_code_is_the_failed_script_s_and_everybody_knows_why(
    cluster: Cluster, ssh_path: str, tmp_path: Path
) -> None:
    result = SshJob(cluster, ssh_path, tmp_path, "2=7").result()
    assert result.code == 7, result.output
    why = "worker 2: its script ended with exit code 7"
    assert result.output.splitlines()[-1] == f"p3kv launch: {why.replace(':', ' failed first:')}"
    assert why in result.said_by("worker 0")


@needs_ssh
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_a_host_when_the_launcher_ends(
    cluster: Cluster, ssh_path: str, tmp_path: Path, signum: signal.Signals
) -> None:
    job = SshJob(cluster, ssh_path, tmp_path)
    job.joined()
    assert len(job.left()) >= 6
    start = time.monotonic()
    job.launcher.send_signal(signum)
    result = job.result()
    expected = -signum if signum == signal.SIGKILL else 128 + signum
    assert result.code == expected, result.output
    assert time.monotonic() - start < DEADLINE_S


@needs_ssh
def test_a_host_that_lets_nobody_in_is_named(
    cluster: Cluster, ssh_path: str, tmp_path: Path
) -> None:
    result = SshJob(cluster, ssh_path, tmp_path, hosts="n0,nobody@n1:2").result()
    assert result.code == 255, result.output
    assert "Permission denied" in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("p3kv launch: cannot start server 1 on nobody@n1: ")
    assert "without a password" in last


@pytest.mark.long
@needs_ssh
def test_more_processes_start_on_a_host_than_sshd_lets_in_at_once(
    cluster: Cluster, ssh_path: str
) -> None:
    env = {"PATH": ssh_path}
    parts = [
        JobPart("scheduler", ("true",), {}, serves_workers=True),
        *(JobPart(f"worker {i}", ("sh", "-c", f"echo {i}; kill -9 $$"), {}) for i in range(13)),
    ]
    host = Host(cluster.hosts[0].address, 13)
    out, err = io.BytesIO(), io.BytesIO()
    there = on_hosts(parts, [host], own_env=env, cwd="/", term_s=1, silence_s=60)
    # From here no host is reached: ssh has to start in a namespace.
    ip = ("ip", "netns", "exec", cluster.hosts[1].namespace)
    there = [replace(part, argv=(*ip, *part.argv)) for part in there]
    code = Launcher(there, out=out, err=err, graces=Graces(others_s=20)).run()
    assert code == 137, err.getvalue()
    assert sorted(int(line.split(b"|")[1]) for line in out.getvalue().splitlines()) == [*range(13)]
    assert f"killed by SIGKILL on {host.name}".encode() in err.getvalue()


@pytest.mark.parametrize(
    ("argv", "cwd", "code", "words"),
    [
        (["true"], "/no/such/folder", 127, "'true' in '/no/such/folder': /no/such/folder: No such"),
        (["no-such-program"], "/", 127, "'no-such-program' in '/': no-such-program: No such file"),
        (["/etc/passwd"], "/", 126, "'/etc/passwd' in '/': /etc/passwd: Permission denied"),
        (["sh", "-c", "echo $OMP_NUM_THREADS; exit 255"], "/", 255, ""),
    ],
    ids=["folder", "program", "permission", "none"],
)
def test_a_guardian_says_what_its_host_lacks(
    argv: List[str], cwd: str, code: int, words: str
) -> None:
    errand = {"argv": argv, "env": {}, "cwd": cwd, "workers_here": 1000, "has_link": False}
    guardian = subprocess.Popen(
        guardian_command("host", 1.0),
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert guardian.stdin is not None
    guardian.stdin.write(json.dumps(errand).encode() + b"\n")
    guardian.stdin.flush()
    assert guardian.wait(30) == code
    out, err = guardian.communicate()
    assert out == GREETING + (b"" if words else b"1\n")
    assert words in err.decode()


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


@pytest.mark.parametrize("said", [b"", b"15\n", b"15\n9\n"])
def test_a_guardian_that_is_told_to_end_before_it_has_an_errand_ends_without_a_word(
    said: bytes,
) -> None:
    """As where another host can't be reached, and the launcher ends the job."""
    command = guardian_command("host", 1.0)
    guardian = subprocess.run(command, input=said, capture_output=True, timeout=30)
    assert (guardian.returncode, guardian.stdout, guardian.stderr) == (0, GREETING, b"")
