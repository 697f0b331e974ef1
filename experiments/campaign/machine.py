"""What a measurement ran on: without it a number means nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Optional

from p3kv.common.version import VERSION

_ROOT = Path(__file__).parent.parent.parent
# What decides how a run comes out; results and documents don't.
_MEASURED = ("p3kv", "scripts", "experiments/*.py")


def describe(congestion_control: str) -> Dict[str, Any]:
    """Returns processor, memory, kernel, versions and the state of the source, as plain values."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes("MemTotal") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **_versions("mxnet", "torch", "numpy"),
        "p3kv": VERSION,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed": bool(_git("status", "--porcelain", "--", *_MEASURED)),
        "congestion_control": congestion_control,
    }


def _versions(*packages: str) -> Dict[str, str]:
    """Versions of those of the packages that this environment has."""
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def available_bytes() -> int:
    """Returns the memory that new processes can have without swapping."""
    return _memory_bytes("MemAvailable")


def _memory_bytes(name: str) -> int:
    return int((_field("/proc/meminfo", name) or "0 kB").split()[0]) * 1024


def _field(path: str, name: str) -> Optional[str]:
    """The first value called `name` in a file of lines `name : value`."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _git(*arguments: str) -> Optional[str]:
    """What git says about this repository; None where this is no checkout or git is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
