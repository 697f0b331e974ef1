"""mpirun and srun for real: over the hosts of a cluster, with their own daemons, ssh and names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterator

import pytest

from experiments.cluster import Cluster, missing_requirements
from tests import slurm, sshd
from tests.jobs import SECRET, SUMS_ONLY, environment, eventually, run
from tests.on_cluster import DEADLINE_S, HOLD, MARK, ClusterJob, command_lines, needs

_MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
_NO_MPIRUN = None if shutil.which("mpirun") else "'mpirun' is missing (package openmpi-bin)"
_NO_CLUSTER = missing_requirements()


@pytest.fixture(scope="module")
def slurm_env(cluster: Cluster) -> Iterator[Dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder, slurm.slurm_on(cluster, Path(folder)) as env:
        yield env


def mpirun(cluster: Cluster, path: str, folder: Path, *arguments: str) -> ClusterJob:
    hosts = ",".join(host.address for host in cluster.hosts)
    names = ["P3KV_SECRET", "PYTHONPATH", "OMP_NUM_THREADS", MARK, *SUMS_ONLY]
    passed = [word for name in names for word in ("-x", name)]
    command = [*_MPIRUN, "--host", hosts, *passed, *HOLD, str(folder), *arguments]
    return ClusterJob(cluster, folder, command, PATH=path)


def srun(cluster: Cluster, env: Dict[str, str], folder: Path, *arguments: str) -> ClusterJob:
    command = ["srun", "-N2", "-n2", *HOLD, str(folder), *arguments]
    return ClusterJob(cluster, folder, command, **env)


@needs(_NO_MPIRUN, _NO_CLUSTER, sshd.missing())
class TestMpirun:
    def test_starts_a_job_on_two_hosts_and_shows_the_secret_to_nobody(
        self, cluster: Cluster, ssh_path: str, tmp_path: Path
    ) -> None:
        job = mpirun(cluster, ssh_path, tmp_path)
        job.wait_until_joined()
        roles = sorted(
            f"{env['DMLC_ROLE']}{env.get('DMLC_SERVER_ID', '')}"
            for env in (process.environ() for process in job.left())
            if "DMLC_ROLE" in env
        )
        assert roles == ["scheduler", "server0", "server1"]
        lines = command_lines()
        assert any("orted" in line for line in lines)
        assert not any(SECRET in line for line in lines)
        job.stop()
        result = job.result()
        assert result.code == 0, result.output
        assert "worker 1 of 2 has joined" in result.output

    def test_ends_with_the_failed_script_s_code_and_everybody_knows_why(
        self, cluster: Cluster, ssh_path: str, tmp_path: Path
    ) -> None:
        result = mpirun(cluster, ssh_path, tmp_path, "1=7").result()
        assert result.code == 7, result.output
        assert "p3kv worker: worker 1: its script ended with exit code 7" in result.output

    def test_a_killed_worker_takes_its_servers_and_the_job_with_it(
        self, cluster: Cluster, ssh_path: str, tmp_path: Path
    ) -> None:
        job = mpirun(cluster, ssh_path, tmp_path)
        job.wait_until_joined()
        workers = [
            process
            for process in job.left()
            if "hold.py" in " ".join(process.cmdline()) and process.name() != "mpirun"
        ]
        first = next(p for p in workers if p.environ().get("OMPI_COMM_WORLD_RANK") == "0")
        first.send_signal(signal.SIGKILL)
        result = job.result()
        assert result.code == 128 + signal.SIGKILL, result.output


@needs(_NO_MPIRUN)
@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec.hydra"])
def test_a_job_of_ranks_on_one_host_needs_nothing_but_its_script(
    tmp_path: Path, launcher: str
) -> None:
    if shutil.which(launcher) is None:
        pytest.skip(f"'{launcher}' is missing (package mpich)")
    (tmp_path / "stop").touch()
    command = _MPIRUN if launcher == "mpirun" else [launcher, "-n", "2"]
    env = environment(P3KV_SECRET="", **SUMS_ONLY)
    result = run([*command, *HOLD, str(tmp_path)], env, DEADLINE_S)
    assert result.code == 0, result.output
    assert "worker 1 of 2 has joined" in result.output


@needs(_NO_CLUSTER)
def test_rank_and_world_size_start_a_job_on_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    first, *_ = cluster.hosts
    started = []
    for rank, host in enumerate(cluster.hosts[:2]):
        place = dict(
            RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1, MASTER_ADDR=first.address,
            MASTER_PORT=29500,
        )  # fmt: skip
        env = environment(**place, **SUMS_ONLY)
        command = [*HOLD, str(tmp_path)]
        started.append(
            host.popen(
                command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "worker 1 of 2 has joined" in outputs[1]


@needs(slurm.missing(), _NO_CLUSTER)
class TestSlurm:
    def test_srun_in_a_batch_script_starts_a_job_and_the_script_itself_is_in_none(
        self, cluster: Cluster, slurm_env: Dict[str, str], tmp_path: Path
    ) -> None:
        script, code = tmp_path / "batch.sh", tmp_path / "code"
        (tmp_path / "stop").touch()
        script.write_text(
            f"#!/bin/bash\n{sys.executable} -c 'import p3kv; print(\"in no job\")'\n"
            f"srun {' '.join(HOLD)} {tmp_path}\necho $? > {code}.new\nmv {code}.new {code}\n"
        )
        # With --wait, sbatch looks seldom.
        command = ["sbatch", "-N2", "-n2", f"--output={tmp_path}/out", str(script)]
        job = ClusterJob(cluster, tmp_path, command, **slurm_env)
        eventually(code.exists, DEADLINE_S)
        said = (tmp_path / "out").read_text() + job.result().output
        assert code.read_text() == "0\n", said
        assert "in no job" in said and "worker 1 of 2 has joined" in said

    def test_srun_ends_with_the_failed_script_s_code_and_everybody_knows_why(
        self, cluster: Cluster, slurm_env: Dict[str, str], tmp_path: Path
    ) -> None:
        result = srun(cluster, slurm_env, tmp_path, "1=7").result()
        assert result.code == 7, result.output
        assert "p3kv worker: worker 1: its script ended with exit code 7" in result.output

    def test_a_cancelled_job_leaves_nothing(
        self, cluster: Cluster, slurm_env: Dict[str, str], tmp_path: Path
    ) -> None:
        job = srun(cluster, slurm_env, tmp_path)
        job.wait_until_joined()
        scancel = ["scancel", "--user=root"]
        cluster.hosts[0].popen(scancel, env={**os.environ, **slurm_env}).wait(DEADLINE_S)
        assert job.result().code != 0


@needs(_NO_CLUSTER)
@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("DMLC_PS_ROOT_URI", {
            "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": "own-name", "DMLC_PS_ROOT_PORT": 9000,
            "DMLC_NUM_WORKER": 1, "DMLC_NUM_SERVER": 1,
        }),
        ("MASTER_ADDR", {
            "RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "own-name", "MASTER_PORT": 29500,
        }),
        ("DMLC_PS_ROOT_URI", {
            "SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2,
            "SLURM_STEP_NODELIST": "own-name,another", "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0,
        }),
    ],
)  # fmt: skip
def test_a_scheduler_that_others_could_not_reach_by_its_name_says_so(
    cluster: Cluster, variable: str, place: Dict[str, object]
) -> None:
    process = cluster.hosts[0].popen(
        [sys.executable, "-c", "import p3kv"],
        env=environment(**place),
        stderr=subprocess.PIPE,
        text=True,
    )
    said = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 1, said
    wrong = "scheduler's host is 'own-name', which on this host means 127.0.1.1: others can't reach"
    assert wrong in said
    assert f"Set {variable} to the host's address in the job's network" in said
