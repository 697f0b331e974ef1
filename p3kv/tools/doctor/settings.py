"""Checks the settings and the secret that a job would have if it started in this environment."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Callable, Iterator, Tuple

import numpy as np

from p3kv import config
from p3kv.codecs import GRADIENTS, VALUES, codec_features, codec_of
from p3kv.common.combinations import among
from p3kv.common.registry import import_modules
from p3kv.config import Settings
from p3kv.consistency import make_consistency
from p3kv.errors import ConfigError
from p3kv.slicing.placement import PLACEMENTS
from p3kv.tools.doctor.findings import OK, PROBLEM, WARNING, Finding
from p3kv.transport import make_transport
from p3kv.wire.credentials import Credentials
from p3kv.wire.messages import JobSettings


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
