"""A worker finds its job in the variables of launchers of ranks; pure."""

from __future__ import annotations

from typing import Dict, Iterator, List, Tuple

import pytest

from p3kv.config import Launch
from p3kv.config.ranks import DMLC, Variables, place
from p3kv.errors import ConfigError

SECRET = {"P3KV_SECRET": "0123456789abcdef"}


def mpirun(rank: int, size: int = 4, here: int = 2) -> Dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(here),
        "OMPI_MCA_orte_hnp_uri": "1441988608.0;tcp://10.0.0.1,172.17.0.1:41449",
        "PMIX_NAMESPACE": "1441988609",
    }


def srun(rank: int, nodes: str = "n[0-1]", step: str = "0") -> Dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": "first,last",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": step,
    }


def torchrun(rank: int, here: int = 2, port: int = 29500) -> Dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "10.0.0.3",
        "MASTER_PORT": str(port),
    }


def root(environ: Dict[str, str]) -> str:
    found = place(environ)
    assert found is not None
    return found.variables["DMLC_PS_ROOT_URI"]


def test_every_rank_is_a_worker_with_a_server_and_the_first_has_the_scheduler() -> None:
    for rank in range(4):
        launch = Launch.from_environment({**mpirun(rank), **SECRET, "MINE": "kept"})
        assert launch is not None
        assert (launch.role, launch.rank, launch.num_workers) == ("worker", rank, 4)
        assert (launch.root_host, launch.num_servers) == ("10.0.0.1", 4)
        roles = [env["DMLC_ROLE"] for env in launch.beside]
        assert roles == (["scheduler", "server"] if rank == 0 else ["server"])
        for env in launch.beside:
            other = Launch.from_environment(env)
            assert other is not None and env["MINE"] == "kept"
            assert (other.job, other.root_port) == (launch.job, launch.root_port)
            assert other.beside == () and other.secret == launch.secret
            assert other.role == "scheduler" or other.rank == rank


@pytest.mark.parametrize("servers", [1, 4, 6])
def test_another_number_of_servers_is_spread_over_the_ranks(servers: int) -> None:
    found = [place({**mpirun(rank), "DMLC_NUM_SERVER": str(servers)}) for rank in range(4)]
    beside = [one for it in found if it is not None for one in it.beside]
    numbers = [int(one["DMLC_SERVER_ID"]) for one in beside if one["DMLC_ROLE"] == "server"]
    assert sorted(numbers) == [*range(servers)]


@pytest.mark.parametrize("servers", ["x", "0", "70000", "1" * 5000])
def test_a_wrong_number_of_servers_is_refused_as_everywhere(servers: str) -> None:
    with pytest.raises(ConfigError, match=r"DMLC_NUM_SERVER is .* number from 1 to 65535"):
        Launch.from_environment({**mpirun(0), **SECRET, "DMLC_NUM_SERVER": servers})


def test_jobs_of_one_cluster_have_ports_of_their_own() -> None:
    found = [place(srun(0, step=str(step))) for step in range(8)]
    ports = {it.variables["DMLC_PS_ROOT_PORT"] for it in found if it}
    assert len(ports) == 8 and all(10_000 <= int(port) < 32_768 for port in ports)
    mine = place({**srun(0), "DMLC_PS_ROOT_PORT": "9000", "DMLC_PS_ROOT_URI": "n9"})
    assert mine is not None and mine.variables["DMLC_PS_ROOT_PORT"] == "9000"
    assert mine.variables["DMLC_PS_ROOT_URI"] == "n9"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n7", "n7"),
        ("n7,n8", "n7"),
        ("n[0-1]", "n0"),
        ("n[007,9-12],a", "n007"),
        ("rack[2-3]node[0-1]-ib,x", "rack2node0-ib"),
        ("a.b-c[10]", "a.b-c10"),
    ],
)
def test_the_first_host_of_a_list_of_slurm_s(nodes: str, first: str) -> None:
    assert root(srun(1, nodes)) == first


def test_on_one_host_the_job_stays_there() -> None:
    assert root(mpirun(1, size=4, here=4)) == "127.0.0.1"
    assert root({**srun(1), "SLURM_STEP_NUM_NODES": "1"}) == "127.0.0.1"
    assert root({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}) == "127.0.0.1"
    assert root(torchrun(3, here=4)) == "127.0.0.1"


def test_rank_and_world_size_are_enough_where_the_first_host_is_told() -> None:
    places = [place(torchrun(rank, port=port)) for rank in range(4) for port in (29500, 29501)]
    found = [one.variables for one in places if one is not None]
    assert [int(one["DMLC_WORKER_ID"]) for one in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(one["DMLC_PS_ROOT_URI"], one["DMLC_NUM_SERVER"]) for one in found} == {
        ("10.0.0.3", "4")
    }
    ports = {one["DMLC_PS_ROOT_PORT"] for one in found}
    assert len(ports) == 2 and not ports & {"29500", "29501"}
    assert root({**torchrun(1), **mpirun(1)}) == "10.0.0.1"


def test_a_job_has_its_launcher_s_number_also_where_the_user_names_it_and_the_port() -> None:
    def name(environ: Dict[str, str]) -> str:
        fixed = {"DMLC_PS_ROOT_PORT": "9000", "DMLC_PS_ROOT_URI": "127.0.0.1"}
        launch = Launch.from_environment({**environ, **fixed})
        assert launch is not None
        return launch.job

    several: List[Tuple[Dict[str, str], ...]] = [
        (srun(0), srun(0, step="1"), {**srun(0), "SLURM_JOB_ID": "8"}),
        (mpirun(0), {**mpirun(0), "PMIX_NAMESPACE": "1441988610"}),
        tuple({**torchrun(0), "TORCHELASTIC_RUN_ID": run} for run in ("a", "b")),
        (torchrun(0), torchrun(0, port=29501)),
    ]
    for jobs in several:
        for named in ({}, {"P3KV_JOB": "tuesday"}):
            assert len({name({**one, **named}) for one in jobs}) == len(jobs)
        others = [{**one, "P3KV_JOB": day} for one in jobs for day in ("tuesday", "friday")]
        assert len({name(one) for one in others}) == len(others)
    assert name(srun(0)) == name(srun(1))


def test_torchrun_inside_of_an_allocation_counts_before_srun() -> None:
    found = place({**srun(1), **torchrun(3), "TORCHELASTIC_RUN_ID": "none"})
    assert found is not None
    assert (found.variables["DMLC_WORKER_ID"], found.variables["DMLC_NUM_WORKER"]) == ("3", "4")


def test_mpirun_inside_of_an_allocation_counts_before_srun() -> None:
    assert root({**srun(0), **mpirun(3)}) == "10.0.0.1"


def test_where_nobody_says_which_host_is_the_first_the_user_must() -> None:
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    indexed = {"JOB_COMPLETION_INDEX": "1", "DMLC_NUM_WORKER": "4"}
    ranks = {"RANK": "1", "WORLD_SIZE": "4"}
    named = ((mpich, "MPICH's mpiexec"), (indexed, "Kubernetes"), (ranks, "RANK and WORLD_SIZE"))
    for environ, name in named:
        with pytest.raises(ConfigError, match=f"{name} .*rank 1 of 4.*DMLC_PS_ROOT_URI"):
            place(environ)
        assert root({**environ, "DMLC_PS_ROOT_URI": "train-0.train"}) == "train-0.train"


def test_several_hosts_need_a_secret() -> None:
    for environ in (mpirun(1), srun(1), torchrun(1)):
        with pytest.raises(ConfigError, match="Set P3KV_SECRET to the same text in all"):
            Launch.from_environment(environ)


def test_other_processes_belong_to_no_job_of_ranks() -> None:
    batch_script = {**srun(0), "SLURM_NTASKS": "2"}
    del batch_script["SLURM_STEP_NUM_TASKS"]
    alone = mpirun(0, size=1, here=1)
    for environ in ({}, batch_script, alone, {"JOB_COMPLETION_INDEX": "0"}):
        assert place(environ) is None
        assert Launch.from_environment(environ) is None
    tracker = {
        **mpirun(1), **SECRET, "DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "10.0.0.9",
        "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2",
    }  # fmt: skip
    launch = Launch.from_environment(tracker)
    assert launch is not None and (launch.role, launch.beside) == ("server", ())


def said_by(environ: Dict[str, str]) -> Iterator[Variables]:
    """How errors name the variables of a rank, and of the processes beside it."""
    launch = Launch.from_environment({**environ, **SECRET})
    assert launch is not None
    for one in (launch, *(Launch.from_environment(beside) for beside in launch.beside)):
        assert one is not None
        yield one.variables


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (torchrun(0), Variables("MASTER_ADDR", "MASTER_PORT", ("WORLD_SIZE",))),
        # Slurm tells hosts and job by variables that nobody sets; what a user sets is DMLC_*.
        (srun(0), Variables(sizes=("SLURM_STEP_NUM_TASKS",))),
        (mpirun(0), Variables(sizes=("OMPI_COMM_WORLD_SIZE",))),
        (
            {**torchrun(0), "DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_PS_ROOT_PORT": "9000"},
            Variables(sizes=("WORLD_SIZE",)),
        ),
    ],
    ids=["ranks", "Slurm", "Open MPI", "ranks, and a scheduler elsewhere"],
)
def test_errors_name_the_variables_that_the_user_has_set(
    environ: Dict[str, str], names: Variables
) -> None:
    assert {*said_by(environ)} == {names}


def test_errors_of_a_role_name_its_own_variables_whatever_ranks_it_inherits() -> None:
    role = {
        "DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_PS_ROOT_PORT": "9000",
        "DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "1",
    }  # fmt: skip
    assert {*said_by({**torchrun(0), **role})} == {DMLC}


def test_a_size_that_no_job_has_is_named_as_it_was_set() -> None:
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE is '70000'; it must be a number"):
        Launch.from_environment({**torchrun(0), "WORLD_SIZE": "70000", **SECRET})
