"""The settings: what each is, what it may be, and how a text of the environment becomes one."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Dict, List, Literal, Mapping, Optional, Sequence

import msgspec
from msgspec import Meta, inspect

from p3kv.common.registry import MAX_CHOICE_CHARS, MAX_NAME_CHARS
from p3kv.common.secret import FILE_VARIABLE, VARIABLE
from p3kv.config.variables import MAX_NUMBER, WORDS, text_of
from p3kv.errors import ConfigError

if sys.version_info >= (3, 9):
    from typing import Annotated
else:
    from typing_extensions import Annotated

PREFIX = "P3KV_"
_FALL_BACKS: Dict[str, List[str]] = {"verbose": ["PS_VERBOSE"]}
"""By setting: variables of ps-lite and frameworks that count where ours is not set."""

MAX_SLICE_ELEMS = 2**28
MAX_PATH_CHARS = 4096
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Chosen = Annotated[str, Meta(min_length=1, max_length=MAX_CHOICE_CHARS)]
"""A class in a table, by its name or with parameters: "topk:share=0.01"
(`p3kv.common.registry.choice_of`)."""


@dataclass(frozen=True)
class Settings:
    """How p3kv works. Settings that hold for the whole job (`p3kv.wire.messages.JobSettings`) must
    be the same on all workers.

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
    placement: Chosen = "by_link"
    """The placement by which the scheduler gives servers their runs of tensors."""
    consistency: Chosen = "bulk_synchronous"
    """The rule by which rounds end on servers, and workers go on with new values."""
    gradient_codec: Chosen = "identity"
    """The codec by which gradients travel to the servers."""
    value_codec: Chosen = "identity"
    """The codec by which values travel to the workers. Initial values always travel as
    they are."""
    leave_zero_rows_out: bool = True
    """Gradients of dense keys travel without rows of zeros where that takes less time; False: they
    travel whole."""
    updates: Optional[Literal["servers", "workers"]] = None
    """Who updates weights where a script does not say; None: it shows in its first step."""
    transport: Chosen = "tcp"
    """The transport by which workers connect to this server."""
    encrypt: bool = False
    """Encrypt all that workers and servers send each other; all of them must have the same."""
    local_aggregation: bool = True
    """Workers of one host sum their gradients in shared memory, and send the sum; False: each sends
    its own."""
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
    stop_timeout_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 30.0
    """How long `p3kv launch` waits for scripts to which it has passed on SIGTERM, SIGINT or SIGHUP,
    before it ends the job."""
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
    checkpoint_every: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] = 1000
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
            variables = [variable_of(setting.name), *_FALL_BACKS.get(setting.name, ())]
            variable = next(filter(environ.get, variables), None)
            if variable is not None:
                value: Any = (text_of(variable, environ) or "").strip()
                if isinstance(setting.default, bool):
                    value = WORDS.get(value.lower(), value)
                found[setting.name] = converted(setting.name, variable, value, strict=False)
        return cls(**found)


def variable_of(setting: str) -> str:
    """The variable of the environment that sets it."""
    return PREFIX + setting.upper()


def add_aliases(aliases: Mapping[str, str]) -> None:
    """Let a framework's variables count where ours are not set, by setting."""
    for setting, variable in aliases.items():
        _FALL_BACKS.setdefault(setting, []).append(variable)


def check_together(settings: Settings) -> None:
    """Raises ConfigError for settings that contradict each other."""
    if settings.resume and settings.checkpoint_dir is None:
        raise ConfigError(
            "resume (P3KV_RESUME) is set without checkpoint_dir (P3KV_CHECKPOINT_DIR), the folder "
            "of the checkpoints from which to go on"
        )


def apply_verbosity(settings: Settings) -> None:
    """Sets the level of p3kv's loggers; warnings are always logged."""
    level = logging.INFO if settings.verbose else logging.WARNING
    logging.getLogger("p3kv").setLevel(level)


def converted(name: str, variable: str, value: Any, strict: bool) -> Any:
    """The value as the setting's type has it; not `strict`: of text, which may spell a number."""
    try:
        return getattr(msgspec.convert({name: value}, Settings, strict=strict), name)
    except msgspec.ValidationError:
        wanted = _wanted(name, strict)
        raise ConfigError(f"{name} ({variable}) is {value!r}; it must be {wanted}") from None


def _wanted(name: str, strict: bool) -> str:
    """Values that a setting's declaration allows, in words."""
    declared: Any = inspect.type_info(Settings)
    kind = next(field.type for field in declared.fields if field.name == name)
    kind = getattr(kind, "types", [kind])[0]  # of an Optional, the type beside None
    if isinstance(kind, inspect.BoolType):
        return "True or False" if strict else "1 or 0"
    if isinstance(kind, inspect.StrType):
        return f"a name of at most {kind.max_length} letters" if kind.max_length else "text"
    whole = "whole " if isinstance(kind, inspect.IntType) else ""
    return f"a {whole}number from {kind.ge} to {kind.le}"


TRIAL = "P3KV_TRIAL"
_TOLD = "P3KV_TOLD"
# Each setting has a variable, too.
_USERS_VARIABLES = ("P3KV_JOB", "P3KV_OPTIMIZERS", "P3KV_PLUGINS", VARIABLE, FILE_VARIABLE)
PLACE = "P3KV_PLACE"
SCRIPT = "P3KV_SCRIPT"
"""The place that a worker has taken, for what it starts."""
_OTHER_VARIABLES = (
    "P3KV_BESIDE_WORKER", "P3KV_LAUNCHED", "P3KV_LAUNCHER_FD", "P3KV_SCHEDULER_FD", PLACE, SCRIPT,
    TRIAL, _TOLD,
)  # fmt: skip

_AKIN = 0.5
"""How much of two names with a word in common must be alike; of others it is 0.6."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Variables that begin with P3KV_ and mean nothing, each with a warning.

    Leaves out those of which the launcher has warned already.
    """
    users = [*(variable_of(field.name) for field in fields(Settings)), *_USERS_VARIABLES]
    known = {*users, *_OTHER_VARIABLES}
    known.update(environ.get(_TOLD, "").split(","))
    unknown = {}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            # Compared without the prefix, which would make all names alike.
            nearest = _nearest(name[len(PREFIX) :], [one[len(PREFIX) :] for one in users])
            wish = f"did you mean {PREFIX}{nearest}?" if nearest else "there is no such setting"
            unknown[name] = f"the variable {ascii(name)[1:-1]} is set and means nothing: {wish}"
    return unknown


def _nearest(name: str, meant: Sequence[str]) -> Optional[str]:
    """The most similar name, one that shares a whole word before all others; None without one."""
    words = set(name.split("_"))
    akin = [one for one in meant if words & set(one.split("_"))]
    found = get_close_matches(name, akin, 1, _AKIN) or get_close_matches(name, meant, 1)
    return found[0] if found else None


def told_of(environ: Mapping[str, str]) -> Dict[str, str]:
    """Additions to a child's environment, so that it does not warn of these variables again."""
    unknown = unknown_variables(environ)
    return {_TOLD: ",".join([*filter(None, [environ.get(_TOLD)]), *unknown])} if unknown else {}
