"""Checks of settings and of this host for what could keep a job from running well here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
import socket
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import msgspec
import numpy as np

from p3kv import config
from p3kv.codecs import GRADIENTS, VALUES, codec_features, codec_of
from p3kv.common.addresses import family_of
from p3kv.common.combinations import among
from p3kv.common.registry import import_modules
from p3kv.common.version import VERSION
from p3kv.config import Launch, Settings
from p3kv.consistency import make_consistency
from p3kv.errors import ConfigError, P3Error
from p3kv.frontends import FRONT_ENDS
from p3kv.slicing.placement import PLACEMENTS
from p3kv.transport import make_transport
from p3kv.wire.address import own_address
from p3kv.wire.credentials import Credentials
from p3kv.wire.messages import JobSettings

OK, WARNING, PROBLEM = "ok", "warning", "problem"
"""Levels: fine; worth a look, but jobs run; jobs fail."""


class Finding(msgspec.Struct, frozen=True):
    """One line for people. `mend` says what to do; empty where there is nothing to do."""

    level: str
    text: str
    mend: str = ""


class Seen(msgspec.Struct, frozen=True):
    """One host: findings, versions by name, and the address at which its processes listen; None if
    they can't."""

    findings: List[Finding]
    versions: Dict[str, str]
    address: Optional[str]


def check_settings() -> Iterator[Finding]:
    """Finds what is misspelt, contradicts itself or lacks a package or folder; then the secret."""
    unknown = config.unknown_variables()
    yield from (Finding(WARNING, text) for text in unknown.values())
    try:
        settings = config.current()
    except ConfigError as error:
        yield Finding(PROBLEM, str(error))
    else:
        problems = list(_of_values(settings)) or list(_of_combinations(settings))
        yield from problems
        if not problems and not unknown:
            yield Finding(OK, "settings can be read, and fit each other")
    yield _of_secret()


def _of_values(settings: Settings) -> Iterator[Finding]:
    checks: Tuple[Callable[[], object], ...] = (
        lambda: config.check_together(settings),
        lambda: import_modules(config.plugins(), "P3KV_PLUGINS"),
        lambda: PLACEMENTS.make(settings.placement),
        lambda: make_consistency(settings.consistency, 2),
        lambda: codec_of(settings, GRADIENTS),
        lambda: codec_of(settings, VALUES),
        lambda: make_transport(settings.transport, settings, bytes(32)),
        lambda: Credentials(bytes(32)),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield Finding(PROBLEM, str(error))
    if settings.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
        yield Finding(
            PROBLEM,
            "P3KV_METRICS_PORT needs the package prometheus_client",
            "pip install 'p3kv[metrics]'",
        )
    folders = {"P3KV_CHECKPOINT_DIR": settings.checkpoint_dir, "P3KV_TRACE": settings.trace}
    for variable, folder in folders.items():
        if folder is not None and not _can_write(Path(folder)):
            yield Finding(
                PROBLEM,
                f"{variable} is '{folder}', where this user can't write",
                "name a folder that can be written on all hosts",
            )


def _of_combinations(settings: Settings) -> Iterator[Finding]:
    """Finds settings that can't be combined, whatever the script does."""
    codecs = codec_of(settings, GRADIENTS), codec_of(settings, VALUES)
    features = {
        *JobSettings.of(settings).features,
        *make_consistency(settings.consistency, 2).features,
        *codec_features(*codecs, np.dtype(np.float32)),
    }
    for entry in among(features):
        level = WARNING if entry.error is None else PROBLEM
        yield Finding(level, f"{entry.in_words}: {entry.reason}", entry.advice)


def _can_write(folder: Path) -> bool:
    """Whether files can be made in the folder, which need not be there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _of_secret() -> Finding:
    try:
        where = config.where_secret_is()
    except ConfigError as error:
        return Finding(PROBLEM, str(error))
    if where is None:
        return Finding(OK, "no secret is set: 'p3kv launch' makes one, other launchers need one")
    return Finding(OK, f"the job's secret is in {where}, long enough and for this user only")


_PACKAGES = ("numpy", "pyzmq", "msgspec")
_FEW_FILES = 1024
"""Data loaders, connections to all servers, and what the script opens."""
_LITTLE_BYTES = 1 << 30
"""MXNet alone takes a third of this in each process."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def examine(root_host: Optional[str] = None) -> Seen:
    """Looks at this host as one of a job whose scheduler is at `root_host`; None: as the
    environment says. Imports the frameworks, which takes seconds."""
    versions, findings = _software()
    address, of_address = _address(root_host)
    findings += [of_address, _files(), _memory()]
    return Seen(findings, versions, address)


def _software() -> Tuple[Dict[str, str], List[Finding]]:
    versions = {"Python": platform.python_version(), "p3kv": VERSION}
    findings, missing = [], []
    for front_end in FRONT_ENDS:
        try:
            # A framework's may be of a class of its own, which can't travel.
            versions[front_end.name] = str(importlib.import_module(front_end.name).__version__)
        except ModuleNotFoundError as error:
            missing.append(Finding(PROBLEM, str(error)))
        # What is missing in a library, and what a package of another version lacks.
        except (ImportError, OSError, AttributeError) as error:
            findings.append(
                Finding(
                    PROBLEM,
                    f"{front_end.name} is installed, but can't be imported: {error}",
                    front_end.how_to_install(),
                )
            )
        else:
            findings += [Finding(OK, text) for text in filter(None, [front_end.devices()])]
    if len(missing) == len(FRONT_ENDS):  # one of them is enough
        findings += missing
    versions.update({name: metadata.version(name) for name in _PACKAGES})
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return versions, [Finding(OK, text), *findings]


def _address(root_host: Optional[str]) -> Tuple[Optional[str], Finding]:
    try:
        launch = Launch.of_a_worker(root_host)
        address = own_address(launch)
    except P3Error as error:
        return None, Finding(PROBLEM, str(error))
    why = f"from which it reaches {launch.root_host}"
    if launch.node_host:
        why = "which DMLC_NODE_HOST names"
    elif launch.interface:
        why = f"which {launch.interface} has (DMLC_INTERFACE)"
    try:
        _listen_and_connect(address)
    except OSError as error:
        return None, Finding(
            PROBLEM,
            f"no process can be reached at {address}, {why}: {error.strerror or error}",
            "set DMLC_INTERFACE to the interface of the job's network, and DMLC_NODE_HOST, if it "
            "is set, to an address of this host",
        )
    return address, Finding(OK, f"processes listen at {address}, {why}; ports are free there")


def _listen_and_connect(address: str) -> None:
    """Raises OSError if a server can't listen at the address, or can't be reached from here."""
    with closing(socket.create_server((address, 0), family=family_of(address))) as listener:
        socket.create_connection(listener.getsockname()[:2], timeout=5).close()


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Finding(OK, f"a process may open {soft} files")
    return Finding(
        WARNING,
        f"a process may open only {soft} files, connections among them",
        f"run 'ulimit -n {_FEW_FILES if hard < 0 else min(_FEW_FILES, hard)}' before the job, or "
        "raise the limit in /etc/security/limits.conf",
    )


def _memory() -> Finding:
    free_bytes = min(_limits_bytes())
    text = f"{free_bytes / 2**30:.1f} GiB of memory are free, for {_cores()} cores"
    if free_bytes >= _LITTLE_BYTES:
        return Finding(OK, text)
    return Finding(
        WARNING, text, "a worker and a server each need MXNet and the model's size several times"
    )


def _limits_bytes() -> Iterator[int]:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for file in _CGROUP_LIMITS:
        try:
            limit = Path(file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            yield int(limit)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft


def _cores() -> int:
    return len(os.sched_getaffinity(0))
