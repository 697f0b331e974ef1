"""`p3kv doctor`: what it finds before a job starts, and what it says of it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import List

import msgspec
import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.tools.doctor_agent import Look, Looked, Target, rate_bytes_s, round_trip_s
from tests import sshd
from tests.jobs import DEADLINE_S, JobResult, environment, run
from tests.on_cluster import needs
from tests.torch_environment import NEEDS_TORCH, PYTHON
from tests.without_mxnet import NEEDS_MXNET

needs_ssh = needs(missing_requirements(), sshd.missing())

DOCTOR = [sys.executable, "-m", "p3kv", "doctor"]


def _lines(output: str, level: str) -> List[str]:
    return [line.split(None, 1)[1] for line in output.splitlines() if line.startswith(f"  {level}")]


@NEEDS_MXNET
def test_a_host_that_is_fine_has_no_problem() -> None:
    result = run(DOCTOR, environment(), 60)
    assert result.code == 0, result.output
    fine = _lines(result.output, "ok")
    assert any("p3kv 0." in line and "mxnet 1." in line and "msgspec" in line for line in fine)
    assert any(line.startswith("processes listen at 127.0.0.1,") for line in fine)
    assert "the job's secret is in P3KV_SECRET, " in result.output
    assert result.output.endswith("\n0 problems\n") and "problem " not in result.output


@NEEDS_MXNET
def test_each_problem_is_said_once_with_what_to_mend(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("known to all who can read it")
    secret.chmod(0o644)
    file = tmp_path / "file"
    file.touch()
    wrong = environment(
        P3KV_RESUME=1, P3KV_SLICESIZE=1000, P3KV_PLACEMENT="everywhere", P3KV_TRACE=file,
        P3KV_SECRET_FILE=secret, DMLC_INTERFACE="none0",
    )  # fmt: skip
    del wrong["P3KV_SECRET"]
    command = ["sh", "-c", 'ulimit -n 300; exec "$@"', "sh", *DOCTOR]
    result = run(command, wrong, 60)
    assert result.code == 1, result.output
    problems = _lines(result.output, "problem")
    for said in (
        "resume (P3KV_RESUME) is set without checkpoint_dir",
        "there is no placement 'everywhere', only balanced,",
        f"P3KV_TRACE is '{file}', where this user can't write",
        f"P3KV_SECRET_FILE is '{secret}', which other users may read",
        "DMLC_INTERFACE is 'none0', which has no address that others can reach",
    ):
        assert sum(line.startswith(said) for line in problems) == 1, result.output
    assert len(problems) == 5 and result.output.endswith("\n5 problems\n")
    unknown, files = _lines(result.output, "warning")
    assert "did you mean P3KV_SLICE_SIZE?" in unknown
    assert files.startswith("a process may open only 300 files")
    assert "to mend it: run 'ulimit -n " in result.output


@NEEDS_MXNET
def test_settings_that_can_t_be_combined_are_found_before_a_job(tmp_path: Path) -> None:
    both = {"P3KV_CONSISTENCY": "local", "P3KV_GRADIENT_CODEC": "dgc"}
    result = run(DOCTOR, environment(**both, P3KV_CHECKPOINT_DIR=tmp_path), 60)
    assert result.code == 1, result.output
    (problem,) = _lines(result.output, "problem")
    assert problem.startswith("a codec of gradients, such as dgc, that applies the optimizer's mom")
    warnings = _lines(result.output, "warning")
    remembers = "with a codec of gradients that remembers"
    assert any(line.startswith(remembers) for line in warnings), result.output
    assert "to mend it: use another codec (topk)" in result.output


@NEEDS_MXNET
@pytest.mark.parametrize("value", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_at_which_nobody_can_listen_is_a_problem(value: str) -> None:
    result = run(DOCTOR, environment(DMLC_NODE_HOST=value), 60)
    assert result.code == 1, result.output
    (problem,) = _lines(result.output, "problem")
    assert problem.startswith(f"no process can be reached at {value}, which DMLC_NODE_HOST names: ")


@NEEDS_MXNET
@needs(missing_requirements())
def test_a_name_that_the_job_would_refuse_is_a_problem(cluster: Cluster) -> None:
    process = cluster.hosts[0].popen(
        DOCTOR, env=environment(DMLC_PS_ROOT_URI="own-name"), stdout=subprocess.PIPE, text=True
    )
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    (problem,) = _lines(output, "problem")
    assert "'own-name', which on this host means 127.0.1.1: others can't reach that" in problem


@NEEDS_MXNET
def test_ipv6_is_an_address_like_others() -> None:
    result = run(DOCTOR, environment(DMLC_PS_ROOT_URI="::1"), 60)
    assert result.code == 0, result.output
    assert any(
        line.startswith("processes listen at ::1, from which it reaches ::1")
        for line in _lines(result.output, "ok")
    )


@NEEDS_MXNET
def test_a_framework_that_can_not_be_imported_is_a_problem(tmp_path: Path) -> None:
    broken = tmp_path / "mxnet"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.11.0: no such file')")
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    result = run(DOCTOR, env, 60)
    assert result.code == 1, result.output
    (problem,) = _lines(result.output, "problem")
    assert problem == "mxnet is installed, but can't be imported: libcudart.so.11.0: no such file"


@NEEDS_TORCH
def test_a_host_with_pytorch_tells_its_versions_to_the_others() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        agent = subprocess.Popen(
            [str(PYTHON), "-m", "p3kv.tools.doctor_agent"],
            env=environment(P3KV_LAUNCHER_FD=theirs.fileno()),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(DEADLINE_S)
        with ours.makefile("rwb") as link:
            link.write(msgspec.json.encode(Look("127.0.0.1", "token")) + b"\n")
            link.flush()
            looked = msgspec.json.decode(link.readline(), type=Looked)
        ours.shutdown(socket.SHUT_RDWR)
        assert agent.wait(DEADLINE_S) == 0
    assert re.match(r"\d+\.\d+\.\d+", looked.seen.versions["torch"])


def test_a_probe_without_the_token_learns_nothing() -> None:
    target = Target("127.0.0.1", "token of the check")
    try:
        with pytest.raises(OSError):
            round_trip_s("127.0.0.1", target.port, "token of the other")
        assert 0 < round_trip_s("127.0.0.1", target.port, "token of the check") < 1
        assert rate_bytes_s("127.0.0.1", target.port, "token of the check") > 1e6
    finally:
        target.close()


def test_without_ssh_other_hosts_are_an_error_in_one_line(tmp_path: Path) -> None:
    result = run([*DOCTOR, "-H", "n0,n1"], environment(PATH=tmp_path), 60)
    assert result.code == 2, result.output
    assert result.output.splitlines()[-1].startswith("p3kv doctor: can't start ssh, which reaches")


@NEEDS_MXNET
@needs_ssh
def test_hosts_and_the_ways_between_them_are_looked_at(cluster: Cluster, ssh_path: str) -> None:
    cluster.set_rate(50)
    try:
        result = _on_first(cluster, ssh_path, "n0,n1:2")
    finally:
        cluster.set_rate(None)
    assert result.code == 0, result.output
    fine = _lines(result.output, "ok")
    for host in cluster.hosts:
        assert f"processes listen at {host.address}, from which" in result.output
    assert "Python and all packages have the same versions" in fine
    assert sum(line.startswith("clocks are ") for line in fine) == 1
    for way in ("n0 to n1", "n1 to n0"):
        (line,) = [line for line in fine if line.startswith(way)]
        rate, unit = line[len(way) :].split(",")[0].split()
        assert unit == "Mbit/s" and 30 < float(rate) < 51, result.output
        assert "round trip" in line


@pytest.mark.long
@needs_ssh
def test_a_host_that_is_not_reached_is_a_problem_of_its_own(
    cluster: Cluster, ssh_path: str
) -> None:
    result = _on_first(cluster, ssh_path, "n0,nobody@n1")
    assert result.code == 1, result.output
    (problem,) = _lines(result.output, "problem")
    assert problem.startswith("ssh does not start p3kv there: ") and "Permission denied" in problem
    assert "host n0:\n  ok  " in result.output


@pytest.mark.long
@needs_ssh
def test_an_address_that_the_others_do_not_reach_is_a_problem(
    cluster: Cluster, ssh_path: str
) -> None:
    result = _on_first(cluster, ssh_path, "n0,n1", DMLC_INTERFACE="lo")
    assert result.code == 1, result.output
    problems = _lines(result.output, "problem")
    assert len(problems) == 2
    assert problems[0].startswith("n0 does not reach n1 at 127.0.0.1, port "), result.output


def _on_first(cluster: Cluster, path: str, hosts: str, **changes: object) -> JobResult:
    command = ["ip", "netns", "exec", cluster.hosts[0].namespace, *DOCTOR, "-H", hosts]
    path = f"{Path(sys.executable).parent}:{path}"
    return run(command, environment(PATH=path, **changes), 90)
