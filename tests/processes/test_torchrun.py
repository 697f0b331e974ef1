"""torchrun starts jobs and starts them again, on one host and on two."""

from __future__ import annotations

import re
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import List

import pytest

from experiments.cluster import Cluster, missing_requirements
from tests.jobs import JOB_S, SCRIPTS, JobResult, environment, run
from tests.on_cluster import needs
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH
_NEEDS_CLUSTER = needs(missing_requirements())
_TORCHRUN = str(PYTHON.parent / "torchrun")


def script(failing: int, folder: Path) -> List[str]:
    return [str(SCRIPTS / "torch_restarts.py"), str(failing), str(folder / "has failed")]


def on_two_hosts(
    cluster: Cluster, arguments: List[str], *secrets: str, restarts: int = 0
) -> List[JobResult]:
    """A worker on each host, which has the secret that `secrets` says, or none."""
    first, *_ = cluster.hosts
    started = []
    for host, secret in zip(cluster.hosts, secrets):
        host.write_names(["127.0.0.1 localhost", f"{host.address} {socket.gethostname()}"])
        command = [
            _TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{first.address}:29400", "--rdzv-id", "job",
            "--local-addr", host.address, "--max-restarts", str(restarts), *arguments,
        ]  # fmt: skip
        started.append(
            host.popen(
                command, environment(P3KV_SECRET=secret), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=JOB_S)[0] for process in started]
    return [JobResult(one.returncode, said, 0.0) for one, said in zip(started, outputs)]


@_NEEDS_CLUSTER
@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.long)])
def test_two_hosts_need_no_secret_and_no_address_and_each_start_is_a_job_of_its_own(
    cluster: Cluster, tmp_path: Path, failing: int
) -> None:
    results = on_two_hosts(cluster, script(failing, tmp_path), "", "", restarts=1)
    said = "\n".join(one.output for one in results)
    assert [one.code for one in results] == [0, 0], said
    assert said.count("ValueError: boom") and said.count("of 2 has trained") == 2, said
    jobs = re.findall(r"a worker of the job '(\w+)'", said)
    assert len(jobs) == 4 and len(set(jobs)) == 2, said


@_NEEDS_CLUSTER
def test_a_secret_that_one_host_has_alone_is_named(cluster: Cluster, tmp_path: Path) -> None:
    results = on_two_hosts(cluster, script(9, tmp_path), "0123456789abcdef", "")
    said = "\n".join(one.output for one in results)
    assert all(one.code for one in results), said
    assert len(re.findall(r"rank \d with a secret .*, and rank \d without", said)) == 2, said


@pytest.mark.long
def test_on_one_host_a_job_starts_again_without_a_secret(tmp_path: Path) -> None:
    command = [_TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", *script(1, tmp_path)]
    result = run(command, environment(P3KV_SECRET=""), JOB_S)
    assert result.code == 0, result.output
    assert "ValueError: boom" in result.output
    assert result.output.count("of 2 has trained") == 2, result.output


def test_a_rank_that_is_killed_is_named_where_another_s_process_group_finds_it_gone() -> None:
    ddp = ["-m", "p3kv.ddp", str(SCRIPTS / "torch_killed.py")]
    result = run([_TORCHRUN, "--nproc-per-node", "2", *ddp], environment(P3KV_SECRET=""), JOB_S)
    assert result.code and "SIGKILL" in result.output, result.output
    named = re.findall(r"p3kv scheduler: (\w+ \d)", result.output)
    # Its server ends with it; torchrun may end the other rank before that has said a word.
    assert named in (["worker 1"], ["server 1"], []), result.output


def test_a_rank_says_what_it_waits_for_where_the_store_does_not_answer() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
        port = nobody.getsockname()[1]
    settings = environment(
        RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port, TORCHELASTIC_RUN_ID="job", TORCHELASTIC_USE_AGENT_STORE="True",
        P3KV_SECRET="", P3KV_RENDEZVOUS_TIMEOUT_S="4",
    )  # fmt: skip
    result = run([str(PYTHON), "-c", "import p3kv.torch"], settings, JOB_S)
    assert result.code == 1
    where = f"over the store that torchrun serves at 127.0.0.1:{port}"
    assert f"p3kv: rank 1 of 2 still waits for the others, {where}" in result.output
    assert "p3kv: rank 1 of 2 can't agree with the others" in result.output
