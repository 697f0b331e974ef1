"""Place of this process in its job, as launchers say."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import List, Mapping, MutableMapping, Optional, Tuple

from p3kv.common.addresses import bare, endpoint
from p3kv.common.secret import FILE_VARIABLE, VARIABLE, account_secret, check_local, job_secret
from p3kv.config import ranks
from p3kv.config.settings import PLACE, SCRIPT, told_of
from p3kv.config.variables import flag, optional_number, text_of
from p3kv.errors import ConfigError

ROLES = ("scheduler", "server", "worker")
_BEGAN = 19
"""See proc_pid_stat(5): when a process began, counted from behind its name."""


@dataclass(frozen=True)
class Launch:
    """Place of this process in its job, as launchers for ps-lite say."""

    role: str
    root_host: str
    root_port: int
    num_workers: int
    num_servers: int
    job: str
    """Name that all processes of the job share; a process with another name is refused."""
    rank: Optional[int] = None
    """The process's rank, where its launcher states it: it gets this one, or is refused."""
    task: Optional[int] = None
    """Number among all processes of its launcher: processes without a rank get the free ranks in
    this order, then by arrival."""
    local_rank: int = 0
    local_size: int = 1
    """Its rank among its host's workers, and how many these are, where the launcher says so."""
    node_host: Optional[str] = None
    interface: Optional[str] = None
    scheduler_fd: Optional[int] = None
    """Listening socket that the launcher passes to the scheduler, so that nobody takes the port."""
    launcher_fd: Optional[int] = None
    """A socket on which the scheduler and the launcher tell each other who failed and who ended."""
    launched: bool = False
    """'p3kv launch' has started the process, and says at the end what made the job fail."""
    beside_worker: bool = False
    """A worker has started the process, and says itself, in the same place, why the job fails."""
    secret: bytes = field(default=b"", repr=False)
    """The job's secret (`p3kv.common.secret`); empty for a job of one account on one machine."""
    variables: ranks.Variables = ranks.DMLC
    """Variables by which the user has said where the job is, for errors."""
    beside: Tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    """Environments of the processes that this one starts beside itself (`p3kv.config.ranks`)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Optional[Launch]:
        """Reads DMLC_*, or what launchers of ranks set; None if none has started this process.
        Raises ConfigError for variables that are missing, no numbers or out of range."""
        place = None if "DMLC_ROLE" in environ else ranks.place(environ)
        told = told_of(environ) if place else {}
        beside = [{**environ, **told, **one} for one in (place.beside if place else ())]
        environ = {**environ, **(place.variables if place else {})}
        role = text_of("DMLC_ROLE", environ)
        if role is None:
            return None
        if role not in ROLES:
            raise ConfigError(
                f"DMLC_ROLE is '{role}'; it must be one of {', '.join(ROLES)}. "
                "Launchers such as 'p3kv launch' set it."
            )
        variables = ranks.variables(environ)
        host = bare(_required("DMLC_PS_ROOT_URI", environ, role))
        port = _launch_number("DMLC_PS_ROOT_PORT", environ, role, 1, 65535)
        num_workers = _launch_number(
            "DMLC_NUM_WORKER", environ, role, 1, 65535, called=variables.sizes[0]
        )
        num_servers = _launch_number("DMLC_NUM_SERVER", environ, role, 1, 65535)
        node_host = bare(text_of("DMLC_NODE_HOST", environ) or "") or None
        interface = text_of("DMLC_INTERFACE", environ) or None
        secret = job_secret(environ)
        if not secret:
            check_local((host, node_host), interface)
        return cls(
            role=role,
            root_host=host,
            root_port=port,
            num_workers=num_workers,
            num_servers=num_servers,
            job=text_of("P3KV_JOB", environ)
            or f"{endpoint(host, port)}/{num_workers}w{num_servers}s",
            rank=optional_number(f"DMLC_{role.upper()}_ID", environ),
            task=_task(role, environ),
            local_rank=optional_number("LOCAL_RANK", environ) or 0,
            local_size=optional_number("LOCAL_WORLD_SIZE", environ) or 1,
            node_host=node_host,
            interface=interface,
            scheduler_fd=optional_number("P3KV_SCHEDULER_FD", environ),
            launcher_fd=optional_number("P3KV_LAUNCHER_FD", environ),
            launched=flag("P3KV_LAUNCHED", False, environ),
            beside_worker=flag("P3KV_BESIDE_WORKER", False, environ),
            secret=secret,
            variables=variables,
            beside=tuple(beside),
        )

    @property
    def common_secret(self) -> bytes:
        """The job's secret, or else this account's; ConfigError where that is not private."""
        return self.secret or account_secret()

    @property
    def wrong_rank(self) -> Optional[str]:
        """Message about a rank that this job can't have; None if nothing is wrong."""
        count = {"worker": self.num_workers, "server": self.num_servers}.get(self.role, 0)
        if self.rank is None or 0 <= self.rank < count:
            return None
        return ranks.out_of_range(self.role, self.rank, count)

    @classmethod
    def of_a_worker(
        cls, root_host: Optional[str], environ: Mapping[str, str] = os.environ
    ) -> Launch:
        """Read what a worker of a job with a secret would read here; by default the scheduler is at
        DMLC_PS_ROOT_URI, or on this host. Raises as `from_environment`."""
        pretended = {
            **environ,
            "DMLC_ROLE": "worker",
            "DMLC_PS_ROOT_URI": root_host or text_of("DMLC_PS_ROOT_URI", environ) or "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "9",
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
            VARIABLE: "of a job to come",
        }
        pretended.pop(FILE_VARIABLE, None)
        launch = cls.from_environment(pretended)
        assert launch is not None
        return launch


def note_place(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell this worker's children that its place in the job is taken."""
    environ[PLACE] = "\n".join([_this_process(), *_described(launch, environ)])


def note_script(command: List[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell children of this process which script they belong to, and its arguments."""
    first = command[0] if command[0] == "-m" else os.path.abspath(command[0])
    environ[SCRIPT] = json.dumps([first, *command[1:]])


def script_above(environ: Mapping[str, str] = os.environ) -> List[str]:
    """The script that this process belongs to, as a child of its process, and its arguments."""
    above: List[str] = json.loads(environ.get(SCRIPT, "[]"))
    return above


def worker_above(launch: Optional[Launch], environ: Mapping[str, str] = os.environ) -> str:
    """Name the worker above this process whose place this one's environment describes; else
    empty."""
    process, *taken = environ.get(PLACE, "").split("\n")
    if launch is None or not taken or process == _this_process():
        return ""
    if not set(taken) & set(_described(launch, environ)):
        return ""
    rank = "a worker" if launch.rank is None else f"worker {launch.rank}"
    return f"{rank} of a job (process {process.partition('.')[0]})"


def trains_alone(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment says that this process is one of one."""
    return environ.get("WORLD_SIZE") == "1"


def _described(launch: Launch, environ: Mapping[str, str]) -> List[str]:
    """A place as p3kv names it, and as launchers of ranks do if one has."""
    where = endpoint(launch.root_host, launch.root_port)
    place = [f"{where} {launch.job} {launch.rank} {launch.task}"]
    if environ.get("RANK"):
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        place.append(" ".join(environ.get(name, "") for name in names))
    return place


def _this_process() -> str:
    """Number of this process and when it began: also after it has become another program."""
    with open("/proc/self/stat", "rb") as stat:
        began = stat.read().rpartition(b")")[2].split()[_BEGAN].decode()
    return f"{os.getpid()}.{began}"


def forget_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove a launcher's words about this process, by which a framework would take a role."""
    for name in set(environ) - set(ranks.without_ranks(environ)):
        del environ[name]


def serves(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether DMLC_ROLE names a role that runs no script."""
    return environ.get("DMLC_ROLE") in ("scheduler", "server")


def root_host(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """DMLC_PS_ROOT_URI, if it is set: the scheduler's host."""
    return text_of("DMLC_PS_ROOT_URI", environ) or None


def take_place(
    host: str, port: str, secret: str, job: str, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Put the address, secret and name that all ranks have agreed on into the environment; what the
    user has set stays."""
    agreed = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port, VARIABLE: secret}
    for name, value in agreed.items():
        if value and not environ.get(name):
            environ[name] = value
    environ["P3KV_JOB"] = " ".join(filter(None, [environ.get("P3KV_JOB"), job]))


def root_port(environ: Mapping[str, str] = os.environ) -> int:
    """DMLC_PS_ROOT_PORT, if it is set, or else 0; ConfigError for what is no number."""
    return optional_number("DMLC_PS_ROOT_PORT", environ) or 0


def where_secret_is(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """Name the variable with the job's secret, or with its file; ConfigError for a bad secret."""
    if not job_secret(environ):
        return None
    return FILE_VARIABLE if environ.get(FILE_VARIABLE) else VARIABLE


def _task(role: str, environ: Mapping[str, str]) -> Optional[int]:
    names = ["DMLC_TASK_ID"]
    if role == "worker":
        names.append("OMPI_COMM_WORLD_RANK")
        if environ.get("SLURM_STEP_NUM_TASKS"):  # a batch script has a number, and is no task
            names.append("SLURM_PROCID")
    numbers = (optional_number(name, environ) for name in names)
    return next((number for number in numbers if number is not None), None)


def _required(name: str, environ: Mapping[str, str], role: str) -> str:
    value = text_of(name, environ)
    if not value:
        raise ConfigError(
            f"{name} is not set, but DMLC_ROLE={role} says that this process belongs to a job. "
            "Start the job with 'p3kv launch' or another launcher that sets the DMLC_* variables."
        )
    return value


def _launch_number(
    name: str, environ: Mapping[str, str], role: str, lowest: int, highest: int, called: str = ""
) -> int:
    """`called`: the variable that the user has set, where the number follows from that."""
    text = _required(name, environ, role)
    try:
        value = int(text)
    except ValueError:
        value = lowest - 1
    if not lowest <= value <= highest:
        raise ConfigError(
            f"{called or name} is '{text}'; it must be a number from {lowest} to {highest}"
        )
    return value
