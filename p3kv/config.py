"""Every setting, read in this one place.

`Settings` say how p3kv works, and are set in code (`p3kv.configure`) or by environment. `Launch`
says which process of its job this is, and comes from the launcher's environment.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Dict, List, Mapping, Optional, Tuple

import msgspec
from msgspec import Meta, inspect

from p3kv import ranks, words
from p3kv.errors import ConfigError
from p3kv.registry import MAX_NAME_CHARS
from p3kv.secret import FILE_VARIABLE, VARIABLE, check_local, job_secret

if sys.version_info >= (3, 9):
    from typing import Annotated
else:
    from typing_extensions import Annotated

ROLES = ("scheduler", "server", "worker")

_PREFIX = "P3KV_"
_TOLD = "P3KV_TOLD"
# Each setting has a variable, too.
_USERS_VARIABLES = ("P3KV_JOB", "P3KV_OPTIMIZERS", "P3KV_PLUGINS", VARIABLE, FILE_VARIABLE)
_OTHER_VARIABLES = ("P3KV_LAUNCHED", "P3KV_LAUNCHER_FD", "P3KV_SCHEDULER_FD", _TOLD)
_FALL_BACKS: Dict[str, List[str]] = {"verbose": ["PS_VERBOSE"]}
"""By setting: variables of ps-lite and frameworks that count where ours is not set."""

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
MAX_SLICE_ELEMS = 2**28
MAX_PATH_CHARS = 4096
_MOST = 2**31 - 1
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
"""The name of a class in a table (`p3kv.registry`)."""


@dataclass(frozen=True)
class Settings:
    """How p3kv works. Those of `JobSettings` hold for the whole job: all workers must have the
    same.

    Each line is the whole declaration of a setting: its name, type, range and default.
    """

    slice_size: Optional[Annotated[int, Meta(ge=1, le=MAX_SLICE_ELEMS)]] = None
    """Most elements in a slice; None has the workers measure the network when they start."""
    deterministic: bool = False
    """Sum in rank order, so that a run with three workers or more repeats bit for bit, too."""
    check_finite: bool = False
    """End the job on a gradient that has nan or infinity, and name its key and its worker."""
    let_workers_leave: bool = False
    """Rounds go on without workers that have left in order; else such a round ends the job."""
    placement: Name = "by_link"
    """The name of the placement by which the scheduler gives servers their runs of tensors."""
    consistency: Name = "bulk_synchronous"
    """The name of the rule by which rounds end on servers, and workers go on with new values."""
    gradient_codec: Name = "identity"
    """The name of the codec by which gradients travel to the servers."""
    value_codec: Name = "identity"
    """The name of the codec by which values travel to the workers. Initial values always travel as
    they are."""
    transport: Name = "tcp"
    """The name of the transport by which workers connect to this server."""
    encrypt: bool = False
    """Encrypt all that workers and servers send each other; all of them must have the same."""
    priorities: bool = True
    """False sends slices first in, first out: slicing without priorities, for comparison."""
    rendezvous_timeout_s: Annotated[float, Meta(ge=0.1, le=86_400.0)] = 300.0
    """How long a process waits after the last arrival before it gives up. Long, because people
    start roles by hand, and pods come one after the other."""
    stall_timeout_s: Annotated[float, Meta(ge=0.1, le=31 * 86_400.0)] = 1800.0
    """How long a round may wait for a worker's push before the job fails."""
    silence_timeout_s: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 120.0
    """How long a process may be silent before the job fails: it is stopped, or its host can't be
    reached. The job goes on when the process answers within this time."""
    warn_after_s: Annotated[float, Meta(ge=0.1, le=86_400.0)] = 10.0
    """How long a process may be silent, or a round wait for a push, before a warning says so."""
    send_buffer_bytes: Optional[Annotated[int, Meta(ge=4096, le=2**30)]] = None
    """Credit: most unsent bytes that the kernel holds for a connection. Priorities do not apply to
    them. None: by the slice size."""
    switch_interval_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0001
    """Python's switch interval in this process while the store exists, if Python's own is longer:
    how long a script that is busy in Python holds the GIL when the network thread wants it. 0 keeps
    Python's own."""
    summary_every: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Every worker logs a line after so many steps, and rank 0 a verdict at the end; 0: none."""
    metrics_port: Optional[Annotated[int, Meta(ge=0, le=65535)]] = None
    """Where workers and servers serve metrics for Prometheus: the first free port from this one on,
    or any if it is 0; None serves none."""
    metrics_host: Name = "127.0.0.1"
    """The address of this host at which metrics are served, to whoever can reach it."""
    checkpoint_dir: Optional[Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]] = None
    """A folder in which servers write checkpoints; None writes none."""
    checkpoint_every: Annotated[int, Meta(ge=1, le=_MOST)] = 1000
    """After how many steps of the script there is a checkpoint."""
    resume: bool = False
    """Go on from the newest complete checkpoint in the folder."""
    trace: Optional[str] = None
    """A folder in which every process writes its trace; None records nothing."""
    verbose: Annotated[int, Meta(ge=0, le=9)] = 0
    """1 logs which processes join and leave and what they agree on (ps-lite's PS_VERBOSE)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads P3KV_<NAME>; ps-lite's and frameworks' own variables count where ours are not set.

        Raises ConfigError for a value that is not of the right kind or out of range.
        """
        found = {}
        for setting in fields(cls):
            variables = [_variable(setting.name), *_FALL_BACKS.get(setting.name, ())]
            variable = next(filter(environ.get, variables), None)
            if variable is not None:
                value: Any = (_text(environ, variable) or "").strip()
                if isinstance(setting.default, bool):
                    value = _WORDS.get(value.lower(), value)
                found[setting.name] = _converted(setting.name, variable, value, strict=False)
        return cls(**found)


def _variable(setting: str) -> str:
    return _PREFIX + setting.upper()


def _converted(name: str, variable: str, value: Any, strict: bool) -> Any:
    """The value as the setting's type has it; not `strict`: of text, which may spell a number."""
    try:
        return getattr(msgspec.convert({name: value}, Settings, strict=strict), name)
    except msgspec.ValidationError:
        wanted = _wanted(name, strict)
        raise ConfigError(f"{name} ({variable}) is {value!r}; it must be {wanted}") from None


def _wanted(name: str, strict: bool) -> str:
    """What a setting's declaration allows, in words."""
    declared: Any = inspect.type_info(Settings)
    kind = next(field.type for field in declared.fields if field.name == name)
    kind = getattr(kind, "types", [kind])[0]  # of an Optional, the type beside None
    if isinstance(kind, inspect.BoolType):
        return "True or False" if strict else "1 or 0"
    if isinstance(kind, inspect.StrType):
        return f"a name of at most {kind.max_length} letters" if kind.max_length else "text"
    whole = "whole " if isinstance(kind, inspect.IntType) else ""
    return f"a {whole}number from {kind.ge} to {kind.le}"


@dataclass(frozen=True)
class Launch:
    """Which process of its job this is, as launchers for ps-lite say."""

    role: str
    root_host: str
    root_port: int
    num_workers: int
    num_servers: int
    job: str
    """Name that all processes of the job share; a process with another name is refused."""
    rank_wish: Optional[int] = None
    """Processes of a role are ranked by their wishes, then by arrival."""
    node_host: Optional[str] = None
    interface: Optional[str] = None
    scheduler_fd: Optional[int] = None
    """A listening socket that the launcher passes to the scheduler, so that no other process can
    take the port that the launcher has chosen."""
    launcher_fd: Optional[int] = None
    """A socket on which the scheduler and the launcher tell each other who failed and who ended."""
    launched: bool = False
    """'p3kv launch' has started the process, and says at the end what made the job fail."""
    secret: bytes = field(default=b"", repr=False)
    """What only the job's processes know (`p3kv.secret`); empty if the job has none."""
    beside: Tuple[Mapping[str, str], ...] = field(default=(), repr=False)
    """Environments of the processes that this one starts beside itself (`p3kv.ranks`)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Optional[Launch]:
        """Reads DMLC_*, or what launchers of ranks set; None if none has started this process.

        Raises ConfigError for variables that are missing, no numbers or out of range.
        """
        place = None if "DMLC_ROLE" in environ else ranks.place(environ)
        told = told_of(environ) if place else {}
        beside = [{**environ, **told, **one} for one in (place.beside if place else ())]
        environ = {**environ, **(place.variables if place else {})}
        role = _text(environ, "DMLC_ROLE")
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
        node_host = _text(environ, "DMLC_NODE_HOST") or None
        interface = _text(environ, "DMLC_INTERFACE") or None
        secret = job_secret(environ)
        if not secret:
            check_local((host, node_host), interface)
        return cls(
            role=role,
            root_host=host,
            root_port=port,
            num_workers=num_workers,
            num_servers=num_servers,
            job=_text(environ, "P3KV_JOB") or f"{host}:{port}/{num_workers}w{num_servers}s",
            rank_wish=_rank_wish(environ, role),
            node_host=node_host,
            interface=interface,
            scheduler_fd=_optional_number(environ, "P3KV_SCHEDULER_FD"),
            launcher_fd=_optional_number(environ, "P3KV_LAUNCHER_FD"),
            launched=_flag(environ, "P3KV_LAUNCHED", False),
            secret=secret,
            beside=tuple(beside),
        )

    @classmethod
    def of_a_worker(
        cls, root_host: Optional[str], environ: Mapping[str, str] = os.environ
    ) -> Launch:
        """What this process would read as a worker, with a secret, whose scheduler is at
        `root_host`; None: at DMLC_PS_ROOT_URI, or on this host. Raises as `from_environment`."""
        pretended = {
            **environ,
            "DMLC_ROLE": "worker",
            "DMLC_PS_ROOT_URI": root_host or _text(environ, "DMLC_PS_ROOT_URI") or "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "9",
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "1",
            VARIABLE: "of a job to come",
        }
        pretended.pop(FILE_VARIABLE, None)
        launch = cls.from_environment(pretended)
        assert launch is not None
        return launch


def root_host(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """DMLC_PS_ROOT_URI, if it is set: the scheduler's host."""
    return _text(environ, "DMLC_PS_ROOT_URI") or None


def where_secret_is(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """The variable that has the job's secret, or names its file; None if there is none.

    Raises ConfigError for a secret that is too short, or that others can read.
    """
    if not job_secret(environ):
        return None
    return FILE_VARIABLE if environ.get(FILE_VARIABLE) else VARIABLE


_overrides: Dict[str, Any] = {}
_settled = False


def add_aliases(aliases: Mapping[str, str]) -> None:
    """Has a framework's variables count where ours are not set, by the settings' names."""
    for setting, variable in aliases.items():
        _FALL_BACKS.setdefault(setting, []).append(variable)


def configure(**settings: Any) -> None:
    """Sets settings in code, over the environment's; the names are those of `Settings`.

    Call it in every worker before the store is created. Raises ConfigError for an unknown name,
    a value out of range, and when it comes too late.
    """
    if _settled:
        raise ConfigError(
            "the store exists and keeps its settings; call p3kv.configure before the first "
            f"{words.current().first_use}"
        )
    known = [field.name for field in fields(Settings)]
    checked = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"there is no setting '{name}'; there are {', '.join(known)}")
        checked[name] = _converted(name, _variable(name), value, strict=True)
    _overrides.update(checked)


def current() -> Settings:
    """The settings that hold now: those set in code, then the environment's, then defaults."""
    return replace(Settings.from_environment(), **_overrides)


def settle() -> Settings:
    """The settings of the store that is being created; `configure` changes nothing any more."""
    global _settled
    settings = current()
    if settings.checkpoint_dir is not None:
        # Servers may have another current folder.
        settings = replace(settings, checkpoint_dir=os.path.abspath(settings.checkpoint_dir))
    check_together(settings)
    _settled = True
    return settings


def check_together(settings: Settings) -> None:
    """Raises ConfigError for settings that contradict each other."""
    if settings.resume and settings.checkpoint_dir is None:
        raise ConfigError(
            "resume (P3KV_RESUME) is set without checkpoint_dir (P3KV_CHECKPOINT_DIR), the folder "
            "of the checkpoints from which to go on"
        )


def wants_traceback() -> bool:
    """Whether an error of p3kv's shows its traceback, too; not if settings are what is wrong."""
    try:
        return current().verbose > 0
    except ConfigError:
        return False


def wants_colours(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a terminal may show colours (https://no-color.org)."""
    return not environ.get("NO_COLOR")


def apply_verbosity(settings: Settings) -> None:
    """Sets the level of p3kv's loggers; warnings are always logged."""
    level = logging.INFO if settings.verbose else logging.WARNING
    logging.getLogger("p3kv").setLevel(level)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Variables that begin with P3KV_ and that p3kv does not read, with a warning for each.

    Without the warning nobody would notice a misspelt name. Variables of which the launcher has
    warned already are left out.
    """
    users = [*(_variable(field.name) for field in fields(Settings)), *_USERS_VARIABLES]
    known = {*users, *_OTHER_VARIABLES}
    known.update(environ.get(_TOLD, "").split(","))
    unknown = {}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            # Compared without the prefix, which would make all names alike.
            meant = [one[len(_PREFIX) :] for one in users]
            nearest = get_close_matches(name[len(_PREFIX) :], meant, n=1)
            wish = f"did you mean {_PREFIX}{nearest[0]}?" if nearest else "there is no such setting"
            unknown[name] = f"the variable {ascii(name)[1:-1]} is set and means nothing: {wish}"
    return unknown


def told_of(environ: Mapping[str, str]) -> Dict[str, str]:
    """What to add to a child's environment, so that it does not warn of these variables again."""
    unknown = unknown_variables(environ)
    return {_TOLD: ",".join([*filter(None, [environ.get(_TOLD)]), *unknown])} if unknown else {}


def plugins(environ: Mapping[str, str] = os.environ) -> List[str]:
    """P3KV_PLUGINS: modules to import before this process takes its role.

    They register what a job may then choose by name. Only the process's own environment names them;
    no message can. They must not import a framework, because a framework takes over roles itself.
    """
    return _modules("P3KV_PLUGINS", environ)


def optimizer_modules(environ: Mapping[str, str] = os.environ) -> List[str]:
    """P3KV_OPTIMIZERS: modules that a server imports after the framework, when its job has an
    optimizer. They register optimizers of the user's own with the framework.

    Only the server's own environment names them; no message can.
    """
    return _modules("P3KV_OPTIMIZERS", environ)


def _modules(variable: str, environ: Mapping[str, str]) -> List[str]:
    return [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]


def flag(name: str, default: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """A front end's own variable that is 1 or 0; ConfigError for another value."""
    return _flag(environ, name, default)


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
    value = _text(environ, name)
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
    text = _text(environ, name)
    if not text:
        return None
    with suppress(ValueError):
        number = int(text)
        if abs(number) <= _MOST:
            return number
    raise ConfigError(f"{name} is '{text}'; it must be a whole number of at most {_MOST}")


def _text(environ: Mapping[str, str], name: str) -> Optional[str]:
    """A variable's value, if it is set; ConfigError for bytes that are no UTF-8, and for what can't
    be printed: every message is one line."""
    value = environ.get(name)
    if value is not None and not value.isprintable():
        raise ConfigError(f"{name} is {value!a}; it must be text in UTF-8 that can be printed")
    return value


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = _text(environ, name)
    if not text:
        return default
    if text.lower() not in _WORDS:
        raise ConfigError(f"{name} is '{text}'; it must be 1 or 0")
    return _WORDS[text.lower()]
