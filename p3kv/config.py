"""Every setting, read in this one place.

`Settings` are how p3kv works and may be set in code (`p3kv.configure`) or by environment;
`Launch` is where this process stands in its job and comes from the launcher's environment.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Dict, List, Mapping, Optional, Tuple

from p3kv.errors import ConfigError

ROLES = ("scheduler", "server", "worker")

_PREFIX = "P3KV_"
_TOLD = "P3KV_TOLD"
# Besides one for each of the settings.
_OTHER_VARIABLES = (
    "P3KV_JOB", "P3KV_LAUNCHED", "P3KV_LAUNCHER_FD", "P3KV_PLUGINS", "P3KV_SCHEDULER_FD", _TOLD
)  # fmt: skip

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
MAX_SLICE_ELEMS = 2**28
MAX_NAME_CHARS = 64
"""Of what is registered by name, such as a placement."""
_RANGES = {
    "slice_size": (1, MAX_SLICE_ELEMS),
    "rendezvous_timeout_s": (0.1, 86_400.0),
    "stall_timeout_s": (0.1, 31 * 86_400.0),
    "send_buffer_bytes": (4096, 2**30),
    "switch_interval_s": (0.0, 1.0),
    "verbose": (0, 9),
}


@dataclass(frozen=True)
class Settings:
    """How p3kv works. The first three hold for the whole job: all workers must have the same."""

    slice_size: Optional[int] = None
    """Most elements in a slice; None has the workers measure the network when they start."""
    deterministic: bool = False
    """Sum in rank order, so that a run repeats bit for bit with three workers or more, too."""
    placement: str = "balanced"
    """The name of the way in which the scheduler gives servers their parts of tensors."""
    priorities: bool = True
    """False sends slices first in, first out: slicing alone, to compare with."""
    rendezvous_timeout_s: float = 300.0
    """How long a process waits without anybody new arriving before it gives up: people start
    roles by hand, and pods come one after the other."""
    stall_timeout_s: float = 1800.0
    """How long a round may wait for a worker's push before the job fails."""
    send_buffer_bytes: Optional[int] = None
    """What the kernel may hold of a connection's unsent data, where no priority reaches it; None
    goes by the size of slices."""
    switch_interval_s: float = 0.0001
    """Python's switch interval in this process from the store's creation to its end, where it was
    longer: how long a script that computes in Python holds the GIL when the network thread wants
    it. 0 leaves it alone."""
    trace: Optional[str] = None
    """A folder in which every process leaves its trace; none is recorded without it."""
    verbose: int = 0
    """1 logs who joins and leaves and what is agreed on (ps-lite's PS_VERBOSE)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name), field.default)

    def _check(self, name: str, value: Any, default: Any) -> None:
        wanted = ""
        if isinstance(default, bool):
            wanted = "" if isinstance(value, bool) else "True or False"
        elif name == "placement":
            fits = isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS
            wanted = "" if fits else f"a name of at most {MAX_NAME_CHARS} letters"
        elif name in _RANGES:
            lowest, highest = _RANGES[name]
            fits = isinstance(value, (type(lowest), int)) and not isinstance(value, bool)
            if value is not default and (not fits or not lowest <= value <= highest):
                wanted = f"{_kind(lowest)} from {lowest} to {highest}"
        if wanted:
            raise ConfigError(f"{name} (P3KV_{name.upper()}) is {value!r}; it must be {wanted}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads P3KV_<NAME>; MXNet's and ps-lite's own variables count where ours are not set.

        Raises ConfigError for a value that is not of the right kind or out of range.
        """
        return cls(
            slice_size=_number(
                environ, ("P3KV_SLICE_SIZE", "MXNET_KVSTORE_SLICE_THRESHOLD"), int, cls.slice_size
            ),
            deterministic=_flag(environ, "P3KV_DETERMINISTIC", cls.deterministic),
            placement=environ.get("P3KV_PLACEMENT") or cls.placement,
            priorities=_flag(environ, "P3KV_PRIORITIES", cls.priorities),
            rendezvous_timeout_s=_number(
                environ, ("P3KV_RENDEZVOUS_TIMEOUT_S",), float, cls.rendezvous_timeout_s
            ),
            stall_timeout_s=_number(environ, ("P3KV_STALL_TIMEOUT_S",), float, cls.stall_timeout_s),
            send_buffer_bytes=_number(
                environ, ("P3KV_SEND_BUFFER_BYTES",), int, cls.send_buffer_bytes
            ),
            switch_interval_s=_number(
                environ, ("P3KV_SWITCH_INTERVAL_S",), float, cls.switch_interval_s
            ),
            trace=environ.get("P3KV_TRACE") or None,
            verbose=_number(environ, ("P3KV_VERBOSE", "PS_VERBOSE"), int, cls.verbose),
        )


@dataclass(frozen=True)
class Launch:
    """This process's place in its job, as launchers for MXNet and ps-lite tell it."""

    role: str
    root_host: str
    root_port: int
    num_workers: int
    num_servers: int
    job: str
    """Name that all processes of the job share; a stranger's is refused."""
    rank_wish: Optional[int] = None
    """Processes of a role are ranked by their wishes, then by arrival."""
    node_host: Optional[str] = None
    interface: Optional[str] = None
    scheduler_fd: Optional[int] = None
    """A listening socket that the launcher hands to the scheduler, so that a port it chose
    cannot be lost to somebody else."""
    launcher_fd: Optional[int] = None
    """A socket on which the scheduler and the launcher tell each other who failed and who ended."""
    launched: bool = False
    """'p3kv launch' has started the process, and says at the end what made the job fail."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Optional[Launch]:
        """The place told by DMLC_*; None if this process was not started by a launcher.

        Raises ConfigError for variables that are missing, no numbers or out of range.
        """
        role = environ.get("DMLC_ROLE")
        if role is None:
            return None
        if role not in ROLES:
            raise ConfigError(
                f"DMLC_ROLE is '{role}'; it must be one of {', '.join(ROLES)}. "
                "Launchers such as 'p3kv launch' set it."
            )
        host = _required(environ, "DMLC_PS_ROOT_URI", role)
        port = _launch_number(environ, "DMLC_PS_ROOT_PORT", role, 1, 65535)
        num_workers = _launch_number(environ, "DMLC_NUM_WORKER", role, 1, 65535)
        num_servers = _launch_number(environ, "DMLC_NUM_SERVER", role, 1, 65535)
        return cls(
            role=role,
            root_host=host,
            root_port=port,
            num_workers=num_workers,
            num_servers=num_servers,
            job=environ.get("P3KV_JOB") or f"{host}:{port}/{num_workers}w{num_servers}s",
            rank_wish=_rank_wish(environ, role),
            node_host=environ.get("DMLC_NODE_HOST") or None,
            interface=environ.get("DMLC_INTERFACE") or None,
            scheduler_fd=_optional_number(environ, "P3KV_SCHEDULER_FD"),
            launcher_fd=_optional_number(environ, "P3KV_LAUNCHER_FD"),
            launched=_flag(environ, "P3KV_LAUNCHED", False),
        )


_overrides: Dict[str, Any] = {}
_settled = False


def configure(**settings: Any) -> None:
    """Sets settings in code, over the environment's; the names are those of `Settings`.

    Call it in every worker before the store is created. Raises ConfigError for an unknown name,
    a value out of range, and when it comes too late.
    """
    if _settled:
        raise ConfigError(
            "the store exists and keeps its settings; call p3kv.configure before the first "
            "mx.kv.create('p3') or Trainer.step"
        )
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"there is no setting '{name}'; there are {', '.join(known)}")
    replace(Settings(), **settings)
    _overrides.update(settings)


def current() -> Settings:
    """The settings that hold now: those set in code, then the environment's, then defaults."""
    return replace(Settings.from_environment(), **_overrides)


def settle() -> Settings:
    """The settings of the store that is being created; `configure` changes nothing any more."""
    global _settled
    settings = current()
    _settled = True
    return settings


def apply_verbosity(settings: Settings) -> None:
    """Has p3kv's loggers say as much as the settings want; warnings are always said."""
    level = logging.INFO if settings.verbose else logging.WARNING
    logging.getLogger("p3kv").setLevel(level)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Variables named like ours that nothing reads, and for each what to say of it.

    A slip in a name would change nothing, and nobody would notice. Those that the launcher has
    told of already are left out.
    """
    settings = [field.name.upper() for field in fields(Settings)]
    known = {*(_PREFIX + setting for setting in settings), *_OTHER_VARIABLES}
    known.update(environ.get(_TOLD, "").split(","))
    unknown = {}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            # Without the prefix, which would make all of them alike.
            nearest = get_close_matches(name[len(_PREFIX) :], settings, n=1)
            wish = f"did you mean {_PREFIX}{nearest[0]}?" if nearest else "there is no such setting"
            unknown[name] = f"the variable {name} is set and means nothing: {wish}"
    return unknown


def told_of(environ: Mapping[str, str]) -> Dict[str, str]:
    """What to add to the environment of processes that need not tell of these variables again."""
    unknown = unknown_variables(environ)
    return {_TOLD: ",".join([*filter(None, [environ.get(_TOLD)]), *unknown])} if unknown else {}


def plugins(environ: Mapping[str, str] = os.environ) -> List[str]:
    """P3KV_PLUGINS: modules to import before this process takes its role.

    They register what a job may then choose by name. A process's own environment names them, and
    nothing else: what arrives from others can't. They must import no framework, which takes roles
    over itself.
    """
    return [name.strip() for name in environ.get("P3KV_PLUGINS", "").split(",") if name.strip()]


def update_on_kvstore_default(environ: Mapping[str, str] = os.environ) -> bool:
    """MXNet's MXNET_UPDATE_ON_KVSTORE: whether optimizers run on the servers unless told."""
    return _flag(environ, "MXNET_UPDATE_ON_KVSTORE", True)


def prepare_for_server_optimizer() -> None:
    """Sets MXNet up for a server process, before it is imported there.

    The native server must not take this process over; operations run where they are called,
    which saves two thread switches an update; and one thread each is best for slices.
    """
    os.environ["DMLC_ROLE"] = "worker"
    os.environ.setdefault("MXNET_ENGINE_TYPE", "NaiveEngine")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _rank_wish(environ: Mapping[str, str], role: str) -> Optional[int]:
    names = [f"DMLC_{role.upper()}_ID", "DMLC_TASK_ID"]
    if role == "worker":
        names += ["OMPI_COMM_WORLD_RANK", "SLURM_PROCID"]
    for name in names:
        wish = _optional_number(environ, name)
        if wish is not None:
            return wish
    return None


def _required(environ: Mapping[str, str], name: str, role: str) -> str:
    value = environ.get(name)
    if not value:
        raise ConfigError(
            f"{name} is not set, but DMLC_ROLE={role} says that this process belongs to a job. "
            "Start the job with 'p3kv launch' or another launcher that sets the DMLC_* variables."
        )
    return value


def _launch_number(
    environ: Mapping[str, str], name: str, role: str, lowest: int, highest: int
) -> int:
    text = _required(environ, name, role)
    try:
        value = int(text)
    except ValueError:
        value = lowest - 1
    if not lowest <= value <= highest:
        raise ConfigError(f"{name} is '{text}'; it must be a number from {lowest} to {highest}")
    return value


def _optional_number(environ: Mapping[str, str], name: str) -> Optional[int]:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is '{text}'; it must be a whole number") from None


def _number(environ: Mapping[str, str], names: Tuple[str, ...], kind: Any, default: Any) -> Any:
    for name in names:
        text = environ.get(name)
        if text:
            try:
                return kind(text)
            except ValueError:
                raise ConfigError(f"{name} is '{text}'; it must be {_kind(kind())}") from None
    return default


def _kind(example: Any) -> str:
    return "a whole number" if isinstance(example, int) else "a number"


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name)
    if not text:
        return default
    if text.lower() not in _WORDS:
        raise ConfigError(f"{name} is '{text}'; it must be 1 or 0")
    return _WORDS[text.lower()]
