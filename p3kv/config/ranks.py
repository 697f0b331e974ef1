"""Processes that a launcher of ranks has started: their place in a job, as DMLC_* variables.

Such launchers (Open MPI's and MPICH's mpirun, Slurm's srun, an Indexed Job of Kubernetes, and all
that set RANK and WORLD_SIZE) start the same script several times and number the processes. Each is
a worker then, with servers beside it: one for each worker, unless DMLC_NUM_SERVER says how many
there are in all. Every rank can start its own without knowing how many hosts there are, and several
servers of a host sum on several cores. The process with rank 0 starts the scheduler, too.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from typing import Callable, Dict, Mapping, Optional, Tuple

from p3kv.common.secret import job_secret
from p3kv.errors import ConfigError

Environ = Mapping[str, str]

_HERE = "127.0.0.1"
_MOST_DIGITS = 5
_USUAL_PORT = 9091  # as dmlc_tracker
_OF_A_RANK = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS",
    "JOB_COMPLETION_INDEX", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "DMLC_ROLE", "DMLC_WORKER_ID", "DMLC_SERVER_ID", "DMLC_TASK_ID", "DMLC_NUM_ATTEMPT",
    "DMLC_JOB_CLUSTER",
}  # fmt: skip
_OF_RANKS = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_STEP_", "TORCHELASTIC_")
"""Variables that say which process of a launcher one is, and beginnings of others' names."""
PORTS = range(10_000, 32_768)
"""Linux gives none of them to a connection by itself."""


@dataclass(frozen=True)
class Variables:
    """Variables by which the user has said where a job is and how large: errors name these."""

    host: str = "DMLC_PS_ROOT_URI"
    port: str = "DMLC_PS_ROOT_PORT"
    sizes: Tuple[str, ...] = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
    """The first one holds the number of workers."""


DMLC = Variables()


@dataclass(frozen=True)
class RankEnvironment:
    """A rank's place in its job: its own variables, and those of each process beside it."""

    variables: Dict[str, str]
    beside: Tuple[Dict[str, str], ...]


def _mpirun_host(environ: Environ) -> str:
    # "1441988608.0;tcp://10.0.0.1,172.17.0.1:41449;tcp6://[fd00::1]:37251": the addresses of
    # mpirun's own host.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"tcp://([^,:;]+)", uri) or re.search(r"tcp6://\[?([^],;]+)", uri)
    return found[1] if found else ""


def _first_node(environ: Environ) -> str:
    """The first host of a list in Slurm's notation, such as "a[01-03,7]-ib,b"."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


@dataclass(frozen=True)
class _Launcher:
    """How one launcher tells its ranks what they must know; all but `name` are variables."""

    name: str
    rank: str
    size: str
    local_size: str = ""
    """Number of the ranks on this host: as many as `size` where the job has one host."""
    hosts: str = ""
    """Number of hosts, where it gives that and no `local_size`."""
    job: Tuple[str, ...] = ("",)
    """A prefix, and what only this job's processes have in common; none if it gives nothing."""
    first_host: Optional[Callable[[Environ], str]] = None
    """Finds an address of rank 0's host, where the launcher tells it and not `by_master`."""
    needs: str = ""
    """A variable that it sets and others do not, where its other variables do not tell it."""
    by_master: bool = False
    """Whether users say host and port by MASTER_ADDR and MASTER_PORT."""
    serves_store: bool = False
    """Whether it may serve a store of keys to its ranks, at MASTER_ADDR and MASTER_PORT."""

    def has_started(self, environ: Environ) -> bool:
        told = not self.needs or bool(environ.get(self.needs))
        return told and _is_number(environ, self.rank, self.size)

    def is_one_host(self, environ: Environ) -> bool:
        if self.hosts:
            return environ.get(self.hosts) == "1"
        return environ.get(self.local_size) == environ[self.size]

    def job_of(self, environ: Environ) -> str:
        """Text that only this job's processes have in common; empty if there is none."""
        prefix, *names = self.job
        numbers = [environ[name] for name in names if environ.get(name)]
        return f"{prefix} {'.'.join(numbers)}" if numbers else ""

    def host_of_rank_0(self, environ: Environ) -> str:
        """An address of rank 0's host; empty if the launcher does not tell."""
        if self.is_one_host(environ):
            return _HERE
        if self.by_master:
            return environ.get("MASTER_ADDR", "")
        return self.first_host(environ) if self.first_host is not None else ""

    def has_store(self, environ: Environ) -> bool:
        return (
            self.serves_store
            and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            and bool(environ.get("MASTER_ADDR"))
            and _is_number(environ, "MASTER_PORT")
        )


def _is_number(environ: Environ, *names: str) -> bool:
    return all(environ.get(name, "").isdecimal() for name in names)


_TORCHRUNS = "TORCHELASTIC_RUN_ID"

_LAUNCHERS = (
    # First: mpirun or srun may have started torchrun on each host, and does not number its ranks.
    _Launcher(
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        job=("torchrun", "MASTER_ADDR", "MASTER_PORT", _TORCHRUNS),
        needs=_TORCHRUNS, by_master=True, serves_store=True,
    ),
    _Launcher(
        "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE", job=("mpirun", "PMIX_NAMESPACE"), first_host=_mpirun_host,
    ),
    # After mpirun, which itself uses srun inside of an allocation. Only srun's own processes have
    # SLURM_STEP_NUM_TASKS: a batch script has a rank, too, but is no rank of a job.
    _Launcher(
        "Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", hosts="SLURM_STEP_NUM_NODES",
        job=("slurm", "SLURM_JOB_ID", "SLURM_STEP_ID"), first_host=_first_node,
    ),
    _Launcher("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # Kubernetes does not say how many there are: the manifest does.
    _Launcher("Kubernetes", "JOB_COMPLETION_INDEX", "DMLC_NUM_WORKER"),
    # Last: others may set these, too. Such launchers may themselves listen at MASTER_PORT, so it
    # only tells jobs apart.
    _Launcher(
        "a launcher with RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        job=("ranks", "MASTER_ADDR", "MASTER_PORT"), by_master=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class LauncherStore:
    """A launcher's store of keys, and which of its ranks this process is."""

    launcher: str
    host: str
    port: int
    rank: int
    size: int


def launcher_store(environ: Environ = os.environ) -> Optional[LauncherStore]:
    """The store over which ranks of several hosts agree on address and secret; None if not
    needed."""
    launcher = None if "DMLC_ROLE" in environ else _launcher(environ)
    if launcher is None or launcher.is_one_host(environ) or not launcher.has_store(environ):
        return None
    if environ.get("DMLC_PS_ROOT_URI") and job_secret(environ):
        return None
    return LauncherStore(
        launcher.name, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]),
        int(environ[launcher.rank]), int(environ[launcher.size]),
    )  # fmt: skip


def place(environ: Environ) -> Optional[RankEnvironment]:
    """The place of this process; None if no launcher of ranks has started it, or it alone. Raises
    ConfigError if the job has several hosts and nothing says which is the first."""
    launcher = _launcher(environ)
    if launcher is None:
        return None
    rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
    host = environ.get("DMLC_PS_ROOT_URI") or launcher.host_of_rank_0(environ)
    if not host:
        raise ConfigError(
            f"{launcher.name} has started this process as rank {rank} of {size} on several hosts, "
            "and does not say where rank 0 runs. Set DMLC_PS_ROOT_URI to the address of that host "
            "in all processes."
        )
    job = launcher.job_of(environ)
    servers = environ.get("DMLC_NUM_SERVER") or str(size)
    # What is no number, or none that can be, is refused where all DMLC_* variables are read.
    num_servers = int(servers) if servers.isdecimal() and len(servers) <= _MOST_DIGITS else 0
    shared = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": environ.get("DMLC_PS_ROOT_PORT") or _port(job),
        "DMLC_NUM_WORKER": str(size),
        "DMLC_NUM_SERVER": servers,
    }
    if job:
        # The user's name for a job may hold for several of them.
        shared["P3KV_JOB"] = " ".join(filter(None, [environ.get("P3KV_JOB"), job]))
    scheduler = [{**shared, "DMLC_ROLE": "scheduler"}] if rank == 0 else []
    return RankEnvironment(
        {**shared, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)},
        (
            *scheduler,
            *(
                {**shared, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(number)}
                for number in range(rank, num_servers, size)
            ),
        ),
    )


def variables(environ: Environ) -> Variables:
    """The variables that errors name: those of the launcher of ranks, where the job follows from
    them."""
    # 'p3kv launch' sets ranks, too, but its users have not.
    launcher = None if environ.get("P3KV_LAUNCHED") else _launcher(environ)
    if launcher is None or environ.get(launcher.size) != environ.get("DMLC_NUM_WORKER"):
        return DMLC
    own = Variables(sizes=(launcher.size,))
    if not launcher.by_master:
        return own
    host_is = environ.get("DMLC_PS_ROOT_URI") == environ.get("MASTER_ADDR")
    port_is = environ.get("DMLC_PS_ROOT_PORT") == _port(launcher.job_of(environ))
    return Variables(
        "MASTER_ADDR" if host_is else own.host, "MASTER_PORT" if port_is else own.port, own.sizes
    )


def _launcher(environ: Environ) -> Optional[_Launcher]:
    """The launcher that has started this process as one of several."""
    launcher = next((one for one in _LAUNCHERS if one.has_started(environ)), None)
    return launcher if launcher is not None and int(environ[launcher.size]) >= 2 else None


def _port(job: str) -> str:
    return str(PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else _USUAL_PORT)


def without_ranks(environ: Environ) -> Dict[str, str]:
    """The environment without a launcher's words about this process, for another one."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_A_RANK and not name.startswith(_OF_RANKS)
    }


def out_of_range(role: str, rank: int, count: int) -> str:
    """Message where a launcher states a rank that its job does not have."""
    ranks = "only rank 0" if count == 1 else f"ranks 0 to {count - 1}"
    return (
        f"{role} {rank} is out of range: this job has {count} {role}{'s' * (count > 1)}, so there "
        f"{'is' if count == 1 else 'are'} {ranks} ({_stated_by(role)}). Start each {role} with a "
        "rank of its own, from 0"
    )


def taken(role: str, rank: int, holder: str) -> str:
    """Message where another process, `holder`, has the rank that a launcher states."""
    return (
        f"rank {rank} is taken: another {role} has it ({holder}). A {role}'s rank is what its "
        f"launcher states ({_stated_by(role)}). Start each {role} with a rank of its own, and each "
        "job with a port of its own"
    )


def task_taken(role: str, task: int, holder: str) -> str:
    """Message where two processes of a role have the same number in their launcher's row."""
    row = "DMLC_TASK_ID"
    if role == "worker":
        row += ", OMPI_COMM_WORLD_RANK or SLURM_PROCID"
    return (
        f"number {task} is taken: another {role} has it ({holder}). Their launcher numbers "
        f"processes by {row}; set DMLC_{role.upper()}_ID to a rank of its own in each {role}"
    )


def _stated_by(role: str) -> str:
    variable = f"DMLC_{role.upper()}_ID"
    return f"{variable}, or its launcher's, such as RANK" if role == "worker" else variable
